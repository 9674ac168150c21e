"""A harness of verifiers that is no program: its loop runs in the process that plays the episode.

verifiers' own harnesses write a script and have `uv` fetch its packages, which a cage without a network can't. Its
contract allows a loop in the process as long as each model call goes through the interception server.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from openai import APIStatusError, AsyncOpenAI
from verifiers.v1.clients import ModelContext  # pyright: ignore[reportMissingImports]
from verifiers.v1.configs.harness import HarnessConfig  # pyright: ignore[reportMissingImports]
from verifiers.v1.dialects.chat import message_to_wire  # pyright: ignore[reportMissingImports]
from verifiers.v1.harness import Harness  # pyright: ignore[reportMissingImports]
from verifiers.v1.runtimes import ProgramResult, Runtime  # pyright: ignore[reportMissingImports]
from verifiers.v1.task import TaskData  # pyright: ignore[reportMissingImports]
from verifiers.v1.trace import Trace  # pyright: ignore[reportMissingImports]

GROUP = "verifiers.v1.harnesses"


class InProcessConfig(HarnessConfig):
    """Without options of its own."""


class InProcessHarness(Harness[InProcessConfig]):
    """A segment is one answer of the model to the conversation so far: it has no tools of its own."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
    ) -> ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=None) as client:
            try:
                await client.chat.completions.create(model=ctx.model, messages=messages)
            except APIStatusError as error:
                # A limit of the seat refuses the request that would be beyond it: verifiers knows which it was.
                return ProgramResult(exit_code=1, stdout="", stderr=str(error))
        return ProgramResult(exit_code=0, stdout="", stderr="")


def offer(name: str) -> None:
    """Puts the harness where verifiers looks for those that it ships with: ids are names of modules there."""
    module = ModuleType(f"{GROUP}.{name}")
    module.__dict__.update(__all__=["InProcessHarness"], InProcessHarness=InProcessHarness, __spec__=__spec__)
    sys.modules[module.__name__] = module
