"""A trainer whose ranks are those of several hosts: which of them come, and what each starts and ends."""
