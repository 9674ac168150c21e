"""How a process behaves towards who runs it: log lines, waits that never stay silent (I8), its port and its end.

No framework; `http_server.py`, which only the two HTTP services import, needs uvicorn.

Consumes:     log records of every package, and the pokes of their waiting loops.
Waits for:    nothing; `Waiting` measures the waits of others.
Unblocked by: nothing.
Produces:     one human line or one JSON object per record, and DeadlineExceeded where a wait made no progress.
"""
