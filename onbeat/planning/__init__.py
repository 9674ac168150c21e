"""Predicts a job before it runs: measured or given rates are walked through the pipeline by the fence's rules."""
