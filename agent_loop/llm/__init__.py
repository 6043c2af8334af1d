"""Generation: one engine (LLMServer), and many of them behind one client (LLMClient)."""
