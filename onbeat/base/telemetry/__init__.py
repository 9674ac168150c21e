"""Log lines of a process, for a person or for a machine.

Consumes:     log records of every package.
Waits for:    nothing.
Unblocked by: nothing.
Produces:     one human line or one JSON object for each record.
"""
