"""Rollout batches become one step of the optimizer, bit for bit the same in any order and on any ranks (I7)."""
