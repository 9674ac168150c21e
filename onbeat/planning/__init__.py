"""`onbeat plan`: predicts seconds an iteration under each schedule.

Consumes a job spec, and the metrics and timeline of a finished job with like batches.
Computes each schedule's formula from the measured times; it starts nothing and asks no service.
"""
