"""Sessions, and the threads and cages that they are played in."""
