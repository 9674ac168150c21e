"""Tasks on Celery: verify, export, backup, removal of files, forgetting; and the clock that starts some of them.

Consumes:     Celery's messages, each of which says that there may be a task to begin; the records of tasks.
Waits for:    a message, at most until the next look at the records.
Unblocked by: gateways and the clock, which create tasks, and the look, which finds those whose message was lost.
Produces:     what tasks make: verdicts, exported models, backups, removed files; and how each ended, in its record.
"""
