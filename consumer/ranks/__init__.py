"""Trains a job's batches, as the loop sees it: by this process, by its threads, or by ranks that are processes."""
