"""The record of rollouts that a trainer keeps in the run folder, and that `replay` and the page read."""
