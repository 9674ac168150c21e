"""Experiment trackers, a small file each, through their own libraries (background.py runs them)."""
