"""Experiment trackers, a small file each, through their own libraries (consumer/trackers.py runs them)."""
