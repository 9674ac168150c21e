"""A generator that dies of the first batch of the job with this seed, as if the kernel had killed it for its memory."""

from __future__ import annotations

import os
import signal
import sys

from contracts.rollouts import Completion, PromptBatch
from producer import __main__ as producer
from producer.engine.base import Turn
from producer.engine.transformers.engine import TransformersEngine

POISON_SEED = 666
POISON_BATCH = "0/train/0"

generate = TransformersEngine.generate


async def die_of_the_poison(
    self: TransformersEngine, batch: PromptBatch, turn: Turn | None = None
) -> list[list[Completion]]:
    if (batch.seed, batch.batch_id) == (POISON_SEED, POISON_BATCH):
        os.kill(os.getpid(), signal.SIGKILL)
    return await generate(self, batch, turn)


TransformersEngine.generate = die_of_the_poison

if __name__ == "__main__":
    sys.exit(producer.main())
