"""Engines of others' libraries: vLLM in a process of the generator's, and a vLLM server of one's own."""
