"""Samples a recorded batch again and compares the digests (I7), from a run folder alone: no Redis, no queue.

`routes.py` shows what is recorded over the gateway, and searches it.

run folder ─▶ command ─ starts ─▶ a reward service
                 │                                ▲
                 └─ starts ─▶ `python -m onbeat_extras.replay` ─▶ engine, players, scorers as a generator has them
                 ◀─ its answer, a file ───────────┘
"""
