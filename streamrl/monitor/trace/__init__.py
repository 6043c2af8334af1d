"""A run as a trace: its event log in the trace event format, which Perfetto and chrome://tracing open.

    event log ──read_events──► slices.py ──► tracks.py ──one object a line──► file (export.py: command, range, file)
    batches.jsonl ──────────► flows.py ─┘

Nothing is held but what is under way: a log of any length is written in the same memory.
Format: "Trace Event Format", the JSON object form. Times are integer microseconds of the wall clock on which
`read_events` puts all processes.
"""
