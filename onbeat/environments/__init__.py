"""A library: the client of the environment service, and what authors of environments import.

Consumes:     tasks, and the model's messages.
Waits for:    the environment service, a number of attempts with a deadline each.
Unblocked by: its answer.
Produces:     openings, replies and typed failures, one for each session.
"""
