"""The scorers, each a pure function of (component, item) → unweighted score, and the rubric over them.

Consumes:     a component of contracts/rewards.py and one RewardItem.
Waits for:    nothing; a scorer that may run away is run by scoring/pool.py under a deadline.
Unblocked by: nothing.
Produces:     a float, or BadReference / UnknownEntryPoint / MissingPackage; the rubric turns these into
              Scored | Unscorable (I6).
"""
