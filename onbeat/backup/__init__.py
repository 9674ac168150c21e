"""Copies a stack's Redis and run folders while jobs run, so that they go on from the copy; and brings the copy back."""
