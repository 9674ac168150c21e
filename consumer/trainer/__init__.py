"""The training of one job, from its checkpoint to its end: start, then gather, step and commit for each iteration."""
