"""Processes of one's own that join a job, as a producer, a trainer or a stage: `onbeat.client` (docs/extend.md).

Consumes:     prompts, rollouts, columns and versions of one job, through the fence, as the user of one role.
Waits for:    work of the job, each time with a deadline; the lease of its trainer.
Unblocked by: publications, other workers' leases that end, commits, the job's end.
Produces:     rollouts, columns, or versions and commits, as the fence lets them through.
"""
