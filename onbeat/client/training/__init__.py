"""The external trainer behind `Consumer`: its lease, what arrives, what it publishes, what it leaves on disk."""
