"""Looks into a job: its streams, the log of its trainers, its dead batches (`onbeat streams`, `logs`, `dead`)."""
