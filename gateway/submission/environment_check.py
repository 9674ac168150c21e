"""What the reward service says of a job's environment, before the job is queued."""

from __future__ import annotations

import logging

from contracts.errors import EnvironmentUnavailable, InvalidInput
from contracts.settings import StackSettings
from contracts.spec import JobSpec
from onbeat.prompts.opening_service import EnvironmentService

TIMEOUT_S = 15.0
"""It may have to import the environment; a submission waits no longer."""
FIELDS = ("environment.name", "environment.params")

log = logging.getLogger(__name__)


def check_environment(spec: JobSpec, settings: StackSettings) -> None:
    """Raises InvalidInput for an environment that isn't there, refuses its parameters, or can't be in such a job.

    A service that is away is no reason to refuse a job, which may wait for it: then its trainer finds out.
    """
    if spec.environment is None:
        return
    try:
        facts = EnvironmentService(settings, deadline_s=TIMEOUT_S).facts(spec.environment)
    except EnvironmentUnavailable as error:
        log.warning("the reward service does not say what it has, so a job's isn't checked: %s", error)
        return
    except InvalidInput as error:
        if error.field not in FIELDS:
            log.warning("the reward service refuses to say what it has: %s", error)
            return
        raise
    if spec.deterministic and not facts.deterministic:
        raise InvalidInput(
            f"environment `{spec.environment.name}` is not deterministic",
            field="deterministic",
            cure="set it to false: the same spec then gives other weights each time",
        )
