"""Our own stages (log-probs of a reference and of a teacher, a reward model, an LLM judge) and the worker of them."""
