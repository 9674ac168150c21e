"""One process's connection to Redis: its rights, its scripts, its deadlines, and errors that become ours."""
