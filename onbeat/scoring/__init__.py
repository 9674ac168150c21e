"""A library: what a process does with completions before it publishes them, by the job's own rubric.

Consumes:     a prompt batch and the completions that were sampled for it.
Waits for:    the reward service, `reward.max_attempts` times for at most `reward.request_timeout_s`.
Unblocked by: its answer; a completion without a score ends the batch with a reason (I6).
Produces:     the groups of a rollout batch, every rollout with its reward.
"""
