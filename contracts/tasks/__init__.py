"""Tasks: work that a request or the clock starts, and that no job waits for."""
