"""Which plug-ins the reward service has: it runs them, and its image may have more packages than the gateway's."""

from __future__ import annotations

import logging
from http import HTTPStatus

import httpx

from contracts.encoding.wire import decode_json
from contracts.errors import ContractViolation, InvalidInput
from contracts.rewards import PluginNames, PluginReward
from contracts.settings import StackSettings
from contracts.spec import JobSpec
from onbeat.http_service.outgoing import make_client

TIMEOUT_S = 5.0

log = logging.getLogger(__name__)


def check_plugins(spec: JobSpec, settings: StackSettings) -> None:
    """Raises InvalidInput for a plug-in that the reward service does not have.

    A reward service that is away is no reason to refuse a job, which may wait for it: then its generators find out.
    """
    wanted = {
        index: component.entry_point
        for index, component in enumerate(spec.reward.components)
        if isinstance(component, PluginReward)
    }
    installed = _installed(settings) if wanted else None
    for index, name in wanted.items():
        if installed is not None and name not in installed:
            raise InvalidInput(
                f"the reward service has no plug-in `{name}`",
                field=f"reward.components[{index}].entry_point",
                cure=f"installed there: {', '.join(sorted(installed)) or 'none'}",
            )


def _installed(settings: StackSettings) -> frozenset[str] | None:
    """None where the service does not say."""
    headers = {"Authorization": f"Bearer {settings.reward_key}"}
    try:
        with make_client(settings.reward_url, headers=headers, timeout=TIMEOUT_S) as http:
            answer = http.get("/v1/plugins")
        if answer.status_code != HTTPStatus.OK:
            raise ContractViolation(f"it answered {answer.status_code}")
        return frozenset(decode_json(answer.content, PluginNames).entry_points)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, InvalidInput, ContractViolation) as error:
        log.warning("the reward service does not say which plug-ins it has, so they are not checked: %s", error)
        return None
