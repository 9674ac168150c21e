"""The process in a cage that plays an environment: it runs the environment's code and checks its answers."""
