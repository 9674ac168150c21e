"""A library: the client of the reward service, and what authors of environments import.

Consumes:     tasks, and the model's messages.
Waits for:    the reward service, a number of attempts with a deadline each.
Unblocked by: its answer.
Produces:     initial observations, replies and typed failures, one for each session.
"""
