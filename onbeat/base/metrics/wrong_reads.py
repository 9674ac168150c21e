"""The reads of objects in this process that brought other bytes than their digest names.

What reads objects counts here; the process's metrics show it (process_metrics.py).
"""

from __future__ import annotations

from collections import Counter

WRONG_READS = Counter({"cache": 0, "host": 0, "store": 0})
"""Layer that gave the bytes → number of such reads since the process began."""
