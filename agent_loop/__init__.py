"""The experience plane: agents that talk to LLM servers, and stream what they live through to the transfer queue.

    trajectory   what an agent returns: token ids, masks, log-probs, weight versions
    loop         the AgentLoop protocol, its context and budgets; loops/ has those that are shipped
    llm/         LLMServer and LLMClient; the router, and the client that outlives servers
    rendering/   chat template and tokenizer; tools/ what agents may call; rewards what a session is worth
    session      one session, and the class of its failure; rows, as the queue stores it
    group        one leased prompt group; worker, many; manager, many workers
    plugins      names and `path.py:Name` for what a user brings; seeds

An agent of one's own needs `agent_loop.loop` and `agent_loop.trajectory`.
"""
