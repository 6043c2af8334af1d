"""The controller: every decision of the queue without I/O (`core`), and the process around it."""
