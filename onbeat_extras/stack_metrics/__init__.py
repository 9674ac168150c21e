"""What the gateway says to Prometheus of the stack and its jobs, by the entry point `onbeat.expositions`."""
