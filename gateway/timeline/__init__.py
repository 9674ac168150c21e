"""Where the time of a job goes: its spans → iterations, lanes, a critical path, words, a trace for Perfetto.

Pure functions of spans, which read no file and no clock; `api/timeline.py` shows what they make over the gateway.
"""
