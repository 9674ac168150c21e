"""`python -m tests.integration.consumer_of_stand_ins MODULE`: a consumer of trainers `python -m MODULE JOB_ID`."""

from __future__ import annotations

import os
import sys

from consumer.supervisor.__main__ import run
from contracts.settings import settings_from
from onbeat.base.telemetry.logs import configure

settings = settings_from(os.environ)
configure(settings, service="consumer")
sys.exit(run(settings, trainer_module=sys.argv[1]))
