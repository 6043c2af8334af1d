"""What the dashboard knows: plain state machines, fed events, metrics and the queue's answers; no I/O, no clock."""
