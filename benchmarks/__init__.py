"""Benchmarks, one module each: `python -m benchmarks.overlap --json FILE`. What counts as a bar is in the report's rows."""
