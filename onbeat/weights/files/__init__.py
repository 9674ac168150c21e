"""A version as safetensors files in a folder."""
