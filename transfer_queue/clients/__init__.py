"""The clients of the queue, and what they need to place and find bytes."""
