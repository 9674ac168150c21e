"""A version as its LoRA matrices."""
