"""A library: what every trainer keeps to, ours and an external one: its lease, the window, what an iteration expects.

Consumes:     an iteration's prompt batches, the fence, the audit chain.
Waits for:    rollout batches, for moments; lease keeper and watches say what a trainer's waits have to notice.
Unblocked by: a publication, or columns that are put.
Produces:     openings, checked batches, the records of the audit chain.
"""
