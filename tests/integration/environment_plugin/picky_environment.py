"""An environment over the demo of tools."""

from __future__ import annotations

from onbeat.environments.adapters.secret_table import SecretTable
from onbeat.environments.author import Message, Reply

TENS = {"2": "twenty", "3": "thirty", "4": "forty", "5": "fifty", "6": "sixty", "7": "seventy", "8": "eighty"}


class Picky(SecretTable):
    """Looks the tens of an answer up, and raises where it has none that it knows."""

    def step(self, message: Message, turn: int) -> Reply:
        if not message.content.startswith("?"):
            TENS[message.content[-1]]
        return super().step(message, turn)
