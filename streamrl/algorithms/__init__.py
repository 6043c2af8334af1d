"""Numbers are pure: functions from arrays to arrays, with shapes and sources in their docstrings.

`advantages` needs numpy only (the trainer process imports it); the rest is torch and is imported by the ranks.
Per-token tensors are flat: [T] holds the response tokens of B rows one row after the other, `row` i64[T] says whose
token each is.
"""
