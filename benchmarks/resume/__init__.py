"""Runs that are killed at any instruction and started again: is every prompt trained once, and none skipped?

    python -m benchmarks.resume --json FILE                      200 kills in virtual time, two minutes
    python -m benchmarks.resume --kills 10000 --jobs 2
    python -m benchmarks.resume --kills 0 --real 25              under Ray, with real processes: ten minutes
    python -m benchmarks.resume --kills 0 --stall                how long the training stands still for a save
    python -m benchmarks.resume --kills 0 --deterministic 40     to the bit (repeats.py): ten minutes

In virtual time each life of a run is a fork of this process, which saves it Python's start and the imports, and ends by
a signal that nothing can catch, after a random amount of CPU time: in a start, a step, a checkpoint, or between two
writes of a file. Trainer, queue, journal and checkpoints are those of any run; the model and the servers are simulated.

Judged by the trainer's own batch log (batches.jsonl), not by the queue. Of all prompts that were issued when the run
ended, each was trained in exactly one step that counts, or was still out, or was dropped. A failure prints its seed.

    __main__    the command          account   what became of the prompts       life      one life, in a fork
    virtual, real, repeats (--deterministic), stall                             the parts
"""
