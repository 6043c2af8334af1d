"""Simulated servers: `server`, the `script` of a request drawn in advance, `engine_time`, and the `virtual_clock`."""
