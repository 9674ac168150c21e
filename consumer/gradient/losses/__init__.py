"""Losses, a small file each, with its paper and equation.

Consumes:     log-probs, advantages and masks of one micro-batch.
Waits for:    nothing; a loss is a function of tensors.
Unblocked by: nothing.
Produces:     the loss summed over responses, undivided, and the numbers that are logged of it.
"""
