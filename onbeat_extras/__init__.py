"""What not every job needs. Each folder is found by its entry points, is imported by no other, and can be deleted.

Consumes:     what its command, service, tracker, export or environment is given by the core, which finds it by name.
Waits for:    what its own modules say; nothing of the core waits for it without a deadline.
Unblocked by: the same.
Produces:     replies of environments, columns of stages, figures, points of a tracker, traces, verdicts.
"""
