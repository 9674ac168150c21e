"""How long ended jobs are kept, and how they go: `onbeat delete`, and what their spec and their stack say.

`sweeper.py` is the worker's part: files. `forgetting.py` is the gateway's: keys, which it removes once the run folder
has all of them, and the endpoint that deletes a job.
"""
