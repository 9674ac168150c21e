"""The processes that share one job's training: what rank 0 asks of the others, and how they answer."""
