"""The way in: jobs over HTTP.

Consumes:     HTTP requests with a bearer key.
Waits for:    the broker, with a deadline.
Unblocked by: events that trainers append.
Produces:     job records, which consumers are woken by, status, events and reports.
"""
