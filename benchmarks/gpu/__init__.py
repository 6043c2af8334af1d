"""Prepared scripts for a GPU that is there for minutes; each can be rehearsed on a CPU (`--device cpu --tiny`)."""
