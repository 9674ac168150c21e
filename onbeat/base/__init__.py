"""Everything that each service stands on and that knows no job: processes, HTTP, logs, metrics, the cage, kernels.

The rooms here import `contracts` and each other, and nothing above `broker` imports the other way round.
"""
