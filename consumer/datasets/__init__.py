"""Data sets, a small file each, and the prompts that an iteration asks of one.

Consumes:     the data set's table in the spec; files, a generator of tasks, or an installed package.
Waits for:    nothing; a data set is a function of its table, the job's seed and the evaluation's size.
Unblocked by: nothing.
Produces:     each iteration's prompts, their reserves, and the held-out ones.
"""
