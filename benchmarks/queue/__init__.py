"""The queue against PyPI's TransferQueue and against a plain copy of the same bytes.

    python -m benchmarks.queue --json queue.json                       # ours, and memcpy
    python -m benchmarks.queue --peer --markdown queue.md --chart queue.svg
    python -m benchmarks.queue --quick --workload verl

A workload is one function that runs one round on a driver and returns its figures. The runner calls it in turns on each
side (ours, peer, memcpy), so that a ratio compares neighbours in time, then takes medians over the rounds.

    __main__    the runner            drivers   the sides' verbs         data       seeded batches
    peer        the peer's process    tables    table, chart             workload   what a workload is

    batches     dense, complex, verl-like and short rows: put, get, clear
    single      one-row puts and gets, alone and 64 at once
    listing     kv_list over 1k, 16k and 100k keys
    watching    watch over as many groups, and what a waiting watcher costs others
    leases      256 rows leased from 1k, 100k and 1M; memory per row
    handoff     last field put -> waiting lease has its references
    starting    init() after the import
"""
