"""The embedded engine: a transformers model with continuous batching, in one thread of the server's process.

server ── batch_engine (who is in the batch) ── decoder (the model and its KV cache) ── sampling
                prefixes: kept KV        invariant: bits that do not depend on the batch        scoring: teachers
"""
