"""How well generation and training overlap: simulated at every size, and measured on the calculator job.

    python -m benchmarks.overlap --json overlap.json                  # all parts: about 40 minutes on two cores
    python -m benchmarks.overlap --part simulation --plots docs/plots --markdown simulation.md
    python -m benchmarks.overlap --part learning --seeds 2

simulation the whole loop on simulated engines and a virtual clock: η against the bound, what the rest was lost to,
           ages, waste and bias over length distributions, staleness, policies and sizes; and on the real clock
learning   `separate_async` on each seed: accuracy before and after, seconds of training
speed      `sync` and `separate_async` in turns on the same seeds: ratio of the training times, accuracy of both
stress     lr 1e-3, constant: every token three versions old, against `sync` at the same rate; and the same without the
           safeguards, which shows that the test discriminates (it is reported, not a bar)
waiting    what the trainer's process costs while nothing is ready: the tool takes 20 s, CPU seconds of 10 of them

    __main__    the command          scenario   one simulated run, and what is measured of it
    calculator  the last four parts  simulation the sweeps and their bars      plots, tables   how they are shown
"""
