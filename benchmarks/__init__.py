"""Benchmarks, one module each: `python -m benchmarks.overlap --json FILE`. Each figure says which bar it has."""
