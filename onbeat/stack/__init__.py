"""A stack on this machine: its plan, its Redis, its processes, and who may reach it."""
