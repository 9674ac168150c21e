"""An environment over the demo of tools, which it takes by its name: it is played where a package offers that."""

from __future__ import annotations

from contracts.environments.service import EnvironmentTable
from onbeat.environments.author import Message, Reply
from reward_service.player.registry import factory_of

SecretTable, _ = factory_of(EnvironmentTable(name="secret_table"))
TENS = {"2": "twenty", "3": "thirty", "4": "forty", "5": "fifty", "6": "sixty", "7": "seventy", "8": "eighty"}


class Picky(SecretTable):
    """Looks the tens of an answer up, and raises where it has none that it knows."""

    def step(self, message: Message, turn: int) -> Reply:
        if not message.content.startswith("?"):
            TENS[message.content[-1]]
        return super().step(message, turn)
