"""A library: processes for code that isn't ours, which may do what their rules allow, and nothing more.

Consumes:     rules, and a function that a caged process is to run.
Waits for:    answers over a socket, each with a deadline.
Unblocked by: an answer, the process's death, or the deadline.
Produces:     caged processes, forked quickly from one that has imported what is slow, and ended with all they started.
"""
