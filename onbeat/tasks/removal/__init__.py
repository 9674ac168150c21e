"""How long ended jobs are kept, and how they go: `onbeat delete`, and what their spec and their stack say.

`deletion.py` is the gateway's part: the endpoint that deletes a job. `sweeper.py` is what the tasks `sweep` and
`delete` do with files. The task `forget` removes keys once the run folder has all of them.
"""
