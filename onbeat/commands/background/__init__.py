"""`onbeat status` and `onbeat down`: what a run folder's stack does, and its end, wherever it was started."""
