"""Environments that come with Onbeat, their tools, and agents that own their loop (onbeat/environments/author.py)."""
