"""The trainer: rollout batches in arrival order become one gradient, one step and one new version.

Beside it `supervisor`, the process that starts trainers, and `stages`, a worker of its own.

Consumes:     rollout batches of the open iteration, from the broker.
Waits for:    the next batch, with a deadline.
Unblocked by: generators that publish through the fence.
Produces:     weights and their manifest, checkpoints, metrics, and the commit that opens the next iteration.
"""
