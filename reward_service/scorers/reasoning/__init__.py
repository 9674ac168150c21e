"""The tasks of reasoning-gym: scored by the package where its scorer evaluates nothing, else by scorers of our own."""
