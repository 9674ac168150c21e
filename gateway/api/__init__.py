"""The endpoints, each file with a router of its own that gateway/app.py names: what a job is told, what it tells."""
