"""How ended jobs go for good: by `onbeat delete`, or at the age of ONBEAT_KEEP_ENDED_DAYS.

    `onbeat delete` ─▶ deletion.py, in the gateway ─┬▶ keys gone, note in onbeat:removed ─▶ file_remover.py: files gone
    clock ─▶ task `forget`, due_jobs.py ────────────┘

Both ways end in the same script of Redis, and in the same removal of files by the tasks `delete` and `remove_files`.
"""
