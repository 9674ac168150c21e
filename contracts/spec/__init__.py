"""The tables of a job's spec, one type each."""
