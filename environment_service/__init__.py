"""A service: sessions of environments, which answer the model turn by turn, in caged processes.

Consumes:     openings, steps and ends of sessions over HTTP, many in one call.
Waits for:    an environment's code, at most `step_timeout_s` for each reset and step.
Unblocked by: its reply, its process's death, or the deadline.
Produces:     a reply or a typed failure for each session of the call.
"""
