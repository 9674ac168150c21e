"""Our own stages: a reference's and a teacher's log-probs, a reward model, an LLM judge (consumer/stages runs them)."""
