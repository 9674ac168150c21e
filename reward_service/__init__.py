"""Rollout → reward: a stateless HTTP service that scores completions and never answers a number it could not compute.

Consumes:     RewardRequest (rubric and items) over HTTP, JSON or MessagePack.
Waits for:    a free scorer process, each item under its own hard deadline.
Unblocked by: the scorer's answer, its death, or the deadline that kills it.
Produces:     RewardResponse: one Scored or Unscorable (I6) per item, in order; Prometheus metrics.
"""
