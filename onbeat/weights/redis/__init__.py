"""A version as chunks in Redis."""
