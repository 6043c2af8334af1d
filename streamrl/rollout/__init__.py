"""LLM servers behind one protocol (`agent_loop.llm.protocol.LLMServer`).

    torch_engine   embedded: a transformers model with continuous batching; batch_engine, decoder, sampling, prefixes
    sim            no model: slots, latencies and failures, on the event loop's clock (real or virtual_clock)
    replica        how a server is built from its config and run, in process or as a Ray actor
    manager        all servers of a run: weight updates, loads

Every server passes tests/rollout/test_llm_server.py. Nothing is imported here: torch and ray load with their modules.
"""
