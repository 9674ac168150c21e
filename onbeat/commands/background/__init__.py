"""`onbeat down`: the end of a run folder's stack, wherever it was started."""
