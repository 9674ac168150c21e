"""A version as what changed since the one before it."""
