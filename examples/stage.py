"""A stage of a job, which rewards answers whose digits don't repeat: python examples/stage.py JOB

The job declares it:

    [[stages]]
    type = "external"
    name = "variety"
    inputs = ["text"]
    outputs = [{ name = "variety", type = "float32" }]
    reward_column = "variety"
    weight = 0.1
"""

import sys

from onbeat.client import Stage

with Stage(sys.argv[1], "variety") as stage:
    for rows in stage:
        stage.put(rows, {"variety": [len(set(text)) / max(1, len(text)) for text in rows["text"]]})
