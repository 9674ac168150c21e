"""Looks into a job: its streams, the log of its trainers, its dead batches (`onbeat streams`, `logs`, `dead`).

`routes.py` shows dead batches over the gateway, and tries them again; it also has whether a run holds.
"""
