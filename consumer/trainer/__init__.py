"""One job, from its checkpoint to its end: start, then gather, step and commit, iteration after iteration."""
