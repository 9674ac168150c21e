"""Reports of a job's streams, and the metrics for Prometheus.

The gateway measures the stack and its jobs; each process that is no HTTP service measures itself.
"""
