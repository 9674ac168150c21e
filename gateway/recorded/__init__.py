"""Recorded batches of a run folder, as HTTP shows them."""
