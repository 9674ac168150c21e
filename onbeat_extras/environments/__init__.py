"""Environments that come with Onbeat, with their tools, and agents that own their loop (environments/author.py)."""
