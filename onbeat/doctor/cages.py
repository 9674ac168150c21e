"""The locks of a cage: a scorer is started in one, as the reward service does, and says which it lacks here."""

from __future__ import annotations

import asyncio

from contracts.errors import OnbeatError
from contracts.settings import StackSettings
from onbeat.doctor.finding import Finding, bad, ok, warn
from reward_service.scoring.pool import ScorerPool, self_test

OUTLIVES = "processes that fork on and on may be left behind"


def look(settings: StackSettings) -> Finding:
    pool = ScorerPool(
        num_threads=1,
        warm_up_timeout_s=settings.scorer_start_s,
        memory_mb=settings.scorer_memory_mb,
        network=settings.scorer_network == "host",
        hidden=(str(settings.run_root_path), str(settings.weight_root_path)),
        readable=settings.readable_in_cages,
    )
    try:
        asyncio.run(self_test(pool))
    except OnbeatError as error:
        return bad("cages", f"a scorer can't be started: {error}", "see the log of a reward service here")
    finally:
        pool.close()
    return of_locks(pool.cages.missing or ())


def of_locks(missing: tuple[str, ...]) -> Finding:
    if not missing:
        return ok("cages", "scorers and environments have all locks")
    namespaces = any("namespaces" in lock for lock in missing)
    cure = "docs/security.md says what each lock keeps off; run plug-ins of people that you trust"
    if namespaces:
        cure = f"sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns=0; {cure}"
    return warn("cages", f"missing: {'; '.join(missing)}", cure)
