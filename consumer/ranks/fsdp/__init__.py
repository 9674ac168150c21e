"""Ranks that share one model by rows (`trainer.sharding = "fsdp"`): how they read it, add up, and pass through it."""
