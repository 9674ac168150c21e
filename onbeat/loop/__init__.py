"""A library: what every trainer keeps to, ours and an external one: its lease, the window, what an iteration expects.

Consumes:     an iteration's plan, the fence, the audit chain.
Waits for:    nothing by itself; the lease keeper and the watch of generators say what a trainer's waits have to notice.
Unblocked by: nothing.
Produces:     openings, checked batches, the records of the audit chain.
"""
