"""How a process behaves towards the one that started it: waits that never stay silent (I8), its end, its children.

Consumes:     the pokes of waiting loops, and commands of child processes.
Waits for:    the ends of child processes, each for a bounded time.
Unblocked by: their exits and signals.
Produces:     child processes that don't outlive their parent, and DeadlineExceeded where a wait made no progress.
"""
