"""Loads data sets: a small file for each kind; `kinds.py` chooses among them, `loading.py` loads a job's own."""
