"""Looks into a job: its streams, the log of its trainers, its dead batches (`onbeat streams`, `logs`, `dead`).

The gateway's routes of dead batches are `routes.py`.
"""
