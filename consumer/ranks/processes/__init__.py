"""The processes that share one job's training: rank 0 gives orders, and every rank carries them out and answers."""
