"""What a caged child runs: an environment's code, with its answers checked."""
