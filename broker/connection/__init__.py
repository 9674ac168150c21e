"""The connection of a process to Redis: its rights, its scripts, its deadlines, and errors that become ours."""
