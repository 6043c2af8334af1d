"""LLM servers: do their numbers agree with training, how fast are they, and what do deaths and new weights cost?

    python -m benchmarks.rollout --json rollout.json            # a quarter of an hour on two cores
    python -m benchmarks.rollout --part ratio

ratio    what the `torch` engine reported while it sampled against what the training ranks compute of the same tokens:
         |ratio - 1|, largest over temperatures, models, layouts and cuts into micro-batches
vllm     the same for vLLM in float32, as a difference of log-probs; only where vLLM is installed (`make vllm`)
engines  tokens/s of the `torch` engine beside vLLM's, what an abort and a pause of thousands take, bits that do not
         depend on the batch
router   decisions per second, evenness, slot use against an oracle, a server killed under load, a storm of disturbances
weights  what a sync takes against copying the bytes, and how long generation stands still for it
parity   the suites that compare every algorithm with a float64 reference of its own, and every layout of ranks with
         plain PyTorch: how many comparisons, and how many fail

    __main__    the command          agreement  ratio, vllm, parity          engines, router, weights   the others
"""
