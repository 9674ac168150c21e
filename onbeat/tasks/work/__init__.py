"""The work of tasks: a function for each kind, safe to run twice, also at the same time."""
