"""What a scorer's process may do, and nothing more."""
