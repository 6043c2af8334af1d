"""The agent loops that are shipped."""
