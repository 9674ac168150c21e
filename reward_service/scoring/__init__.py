"""The processes that score, each with its deadline."""
