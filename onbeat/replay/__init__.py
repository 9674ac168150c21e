"""Samples a recorded batch again and compares the digests (I7), from a run folder alone: no Redis, no queue.

run folder ─▶ command ─ starts ─▶ a reward service
                 │                                ▲
                 └─ starts ─▶ `python -m onbeat.replay` ─▶ engine, players, scorers as a generator has them
                 ◀─ its answer, a file ───────────┘
"""
