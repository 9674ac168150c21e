"""What each kind of task does: a function for each, safe to run twice, also at the same time."""
