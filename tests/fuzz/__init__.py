"""Searches for requests and bytes that end in a traceback: `make fuzz`."""
