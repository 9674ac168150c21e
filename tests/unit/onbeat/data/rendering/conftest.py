"""What the tests of rendering share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from onbeat.data.rendering.chat_template import ChatTemplate
from tests.unit.onbeat.data.rendering.chat_models import CHATML, WITH_TOOLS, chat_tokenizer


@pytest.fixture(scope="module")
def shared_template_processes() -> Iterator[None]:
    """Keeps the processes of the usual templates for a module, whose tests make hundreds of tokenizers with them.

    A template's process lives as long as something in this process refers to it: each tokenizer would start another.
    """
    templates = [ChatTemplate(chat_tokenizer(text)) for text in (CHATML, WITH_TOOLS)]
    for template in templates:
        template.write([{"role": "user", "content": "?"}], opens_turn=True)
    yield
    templates.clear()
