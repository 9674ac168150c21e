"""Scores and plays: completions → rewards, and what answers the model turn by turn, in caged processes of two pools.

Consumes:     RewardRequest (rubric and items); requests that begin, step and end environments' sessions; all over HTTP.
Waits for:    a free scorer process, each item under its own hard deadline; an environment's code, each call likewise.
Unblocked by: the answer, the process's death, or the deadline that kills it.
Produces:     one Scored or Unscorable (I6) per item, one reply or typed failure per session, in order; metrics.
"""
