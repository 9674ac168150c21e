"""One job, from its checkpoint to its end: start, gather, commit, iteration after iteration."""
