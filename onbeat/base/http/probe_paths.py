"""The paths by which monitors reach a process, the same on an HTTP service and on the server of a worker's metrics."""

METRICS_PATH = "/metrics"
METRICS_KEY = "ONBEAT_METRICS_KEY"
"""The setting of the key that METRICS_PATH asks for."""
HEALTH_PATH = "/healthz"
"""Answers without a key that the process lives."""
