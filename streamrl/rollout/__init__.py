"""LLM servers behind one protocol (`agent_loop.llm.protocol.LLMServer`), a room for each kind:

    torch/     embedded: a transformers model with continuous batching
    vllm/      vLLM's AsyncLLM, its engine in a process of its own
    sglang/    an SGLang process of another environment, over HTTP
    sim/       no model: slots, latencies and failures, on the event loop's clock, real or virtual

    building   a server from its `server_config`, in this process
    replica    the same as a Ray actor, which comes back when it dies
    manager    all servers of a run as one: weight updates, sleep, loads
    fleet      servers that join, drain and leave a running job; limits, fleet_api (over HTTP)

Every server passes tests/rollout/test_llm_server.py. Nothing is imported here: torch and ray load with their modules.
"""
