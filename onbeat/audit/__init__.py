"""A run, checked again: its audit chain, and the weights that are still on disk.

Consumes:     audit records and a spec, as values or as a file; the folders of a run.
Waits for:    nothing but the disk.
Unblocked by: nothing.
Produces:     a verdict, with each gap in a sentence.
"""
