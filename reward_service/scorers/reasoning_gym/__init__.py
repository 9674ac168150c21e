"""Scorers of kinds that a spec knows and the core doesn't score: reasoning-gym's tasks (reward_service runs them)."""
