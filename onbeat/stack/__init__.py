"""A stack on this machine: its options, its Redis, its processes, and who may reach it."""
