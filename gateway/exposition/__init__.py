"""What Prometheus reads of the gateway: requests, the stack, each active job, its last iteration and its stages."""
