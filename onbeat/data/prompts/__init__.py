"""A library: a job's data set, and which prompts each iteration asks of it. It imports no torch.

Consumes:     the data set's table in the spec; files, a generator of tasks, or an installed package; a tokenizer.
Waits for:    nothing; all of it is a function of the spec, the job's seed and the iteration (I7).
Unblocked by: nothing.
Produces:     each iteration's prompt batches, their reserves, and the held-out ones.
"""
