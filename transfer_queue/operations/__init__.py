"""Looking at a running queue from outside: the command line, the doctor, metrics."""
