"""A job as a Python program has it: started or found, followed, ended, exported (`onbeat.train`, `onbeat.attach`).

Consumes:     specs, functions and rows of the program, events and answers of a gateway, or the folder of a run.
Waits for:    a stack that it starts, and the job's end, which the program asks for.
Unblocked by: events of the job, Ctrl-C, the end of the program.
Produces:     iterations as they are committed, a verdict, a model; files below `<run_dir>/inputs`.
"""
