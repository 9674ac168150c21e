"""Predicts a job before it runs: measured or given rates drive a simulation of the pipeline by the fence's rules."""
