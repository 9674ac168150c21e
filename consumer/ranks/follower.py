"""Every rank but 0: it knows no Redis and no lease, and does what rank 0 asks until that says it is over."""

from __future__ import annotations

import logging
import signal

import torch.distributed as dist

from consumer.exit_codes import DONE
from consumer.ranks.membership import follow_lead
from consumer.ranks.orders import End, Failed
from consumer.ranks.worker import RankWorker
from consumer.trainer.assembly import idle_patience_s, make_learner
from contracts.errors import OnbeatError
from contracts.settings import StackSettings

log = logging.getLogger(__name__)


def follow(settings: StackSettings) -> int:
    """The exit code. Raises Unavailable where rank 0 or the launcher is gone."""
    member = follow_lead(device=settings.device)
    patience_s = idle_patience_s(member.spec)
    try:
        learner = make_learner(settings, member.spec, member)
    except OnbeatError as error:
        # Rank 0 ends the job with this reason, if not with its own: to die first would only end the group.
        log.error("%s", error)
        member.exchange.answer(Failed.of(member.rank, error))
        while not isinstance(member.exchange.next_order(patience_s), End):
            pass
        return DONE
    log.info("ready")

    def on_training() -> None:
        if learner.lockstep is not None:
            # Asked to stop, rank 0 saves first, and can't do it alone.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    RankWorker(member.exchange, learner, patience_s=patience_s, on_training=on_training).run()
    dist.destroy_process_group()
    return DONE
