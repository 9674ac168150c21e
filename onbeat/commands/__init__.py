"""The commands of the command line, one small module for each group.

Consumes:     flags, the environment, spec files and `<run_dir>/stack.json`.
Waits for:    the gateway, through `onbeat.client.gateway`.
Unblocked by: its answers.
Produces:     text for people, or with --json exactly one JSON object on stdout; an exit code.
"""
