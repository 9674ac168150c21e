"""`onbeat top`: jobs, generators, streams and alerts on one screen."""
