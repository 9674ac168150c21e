"""vLLM as an engine: in the generator's own process, and its worker extension that loads verified weights."""
