"""The table of experience: a row for each rollout of an open iteration, and the columns that stages add to it."""
