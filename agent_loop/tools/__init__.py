"""What agents may call."""
