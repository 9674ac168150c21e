"""The worker: decides which jobs get a trainer here, and runs each as a process of its own. It imports no torch."""
