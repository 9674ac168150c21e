"""Experiment trackers, a small file each, through their own libraries.

Consumes:     iteration metrics and evaluation scores of one job.
Waits for:    the tracker's library, in a thread of its own; at the job's end, with a deadline.
Unblocked by: nothing; a tracker that fails is turned off.
Produces:     one point a step in the tracker.
"""
