"""`python -m onbeat.doctor.gpu_start --trainer-gpu A --generator-gpu B COMMAND …`: a container begins on its card.

    variables, the driver's answers, torch ─▶ cards.py ─┬▶ a line with the cure, and exit 2
                                                        └▶ COMMAND takes this process's place

`docker-compose.yml` puts it before the trainer's and the generator's program, profile gpu. A and B are the devices of
compose (TRAINER_GPU, GENERATOR_GPU). Where they are one, vLLM sleeps in the trainer's turns and has a fifth of the card
for its cache, as `onbeat up --gpu` has it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from contracts.engines import VllmOptions, variable
from contracts.errors import InvalidInput, OnbeatError
from contracts.settings import engine_from
from onbeat.doctor.cards import Ask, TorchBuild, cards_of, look, run_nvidia_smi, shared_engine, torch_build
from onbeat.doctor.finding import Level

BAD_SETTING = 2
"""The exit code of a process for a bad setting."""


def started_with(
    environment: Mapping[str, str], *, is_shared: bool, build: TorchBuild, ask: Ask = run_nvidia_smi
) -> dict[str, str]:
    """Returns the variables of the program, once its card has been found well; warnings go to stderr.

    Args:
        environment: The container's variables.
        is_shared: True where trainer and generators have one card.
        build: The container's torch.
        ask: Runs nvidia-smi.

    Raises:
        InvalidInput: The first thing that would keep the program from its card, with the cure.
    """
    engine = engine_from(environment)
    changes: dict[str, str] = {}
    if is_shared and isinstance(engine, VllmOptions):
        engine = shared_engine(engine, cards_of(ask))
        assert isinstance(engine, VllmOptions)
        changes[variable("sleep_mode")] = "true"
        changes[variable("kv_cache_mb")] = str(engine.kv_cache_mb)
    for finding in look("cuda", engine, build, ask, is_shared=is_shared):
        if finding.level is Level.BAD:
            raise InvalidInput(finding.says, field=finding.subject, cure=finding.cure)
        if finding.level is Level.WARN:
            sys.stderr.write(f"{finding.subject}: {finding.says} ({finding.cure})\n")
    return {**environment, **changes}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m onbeat.doctor.gpu_start", description=__doc__)
    parser.add_argument("--trainer-gpu", required=True, help="the trainer's device, by its number or id")
    parser.add_argument("--generator-gpu", required=True, help="the generators'")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the program, with its arguments")
    arguments = parser.parse_args(words)
    if not arguments.command:
        parser.error("COMMAND: name the program that is started")
    is_shared = arguments.trainer_gpu == arguments.generator_gpu
    try:
        environment = started_with(os.environ, is_shared=is_shared, build=torch_build())
    except OnbeatError as error:
        sys.stderr.write(f"{error}\n")
        return BAD_SETTING
    # The program has this process's number, and so the container's signals.
    os.execvpe(arguments.command[0], arguments.command, environment)


if __name__ == "__main__":
    sys.exit(main())
