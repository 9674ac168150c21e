"""What is asked of the gateway: read from a request, and checked before a job is queued."""
