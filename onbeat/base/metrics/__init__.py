"""Metrics that a process without an HTTP service of its own serves to Prometheus."""
