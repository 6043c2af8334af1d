"""The loop: sample, compare, update, publish; its modes, replay buffer, staleness, validation and checkpoints."""
