"""vLLM in the generator's process."""
