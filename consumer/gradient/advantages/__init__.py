"""Advantages, a small file each, with its paper and equation.

Consumes:     the rewards of one rollout batch.
Waits for:    nothing; an advantage is a function of its group's rewards.
Unblocked by: nothing.
Produces:     one number for each completion, exactly 0.0 where a group's rewards are equal.
"""
