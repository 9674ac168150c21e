"""How a process tells what it does: log lines on stderr, and waits that never stay silent (I8). No framework.

Consumes:     log records of every package, and the pokes of their waiting loops.
Waits for:    nothing; `Waiting` measures the waits of others.
Unblocked by: nothing.
Produces:     one human line or one JSON object per record, and DeadlineExceeded where a wait made no progress.
"""
