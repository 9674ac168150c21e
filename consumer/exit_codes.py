"""How `python -m consumer JOB_ID` ends."""

DONE = 0
"""The job is final, or this trainer was stopped and gave its lease back."""
DIED = 1
"""It died and may be started again: Redis stayed away, the fence moved under it, a rank is gone."""
FAILED = 2
"""The job failed, and says why."""
HELD = 3
"""Another trainer holds the job."""
STOPPED = 4
"""Asked to end while it loaded, or while Redis was away: it ended where it stood, and had nothing to save."""
