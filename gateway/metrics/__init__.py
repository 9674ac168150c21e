"""What a job's streams hold; what Prometheus is told by the gateway, of the stack and its jobs, and by each process
that is no HTTP service."""
