"""Four bits in vLLM's linears: how an engine starts in them, and how a refit fills its memory."""
