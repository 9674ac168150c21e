"""Runs a benchmark up to the point where it has read its flags, so that a command can be held against its parser."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import pytest


class ParsedError(BaseException):
    """A benchmark's flags were taken: it isn't run."""


def assert_takes(monkeypatch: pytest.MonkeyPatch, module: str, words: Sequence[str]) -> None:
    """Fails if a benchmark refuses its flags. `module` is its module, and `words` are its flags."""
    parse_args = argparse.ArgumentParser.parse_args

    def stop(parser: argparse.ArgumentParser, *arguments: Any, **options: Any) -> NoReturn:
        parse_args(parser, *arguments, **options)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(sys, "argv", [module, *words])
    with pytest.raises(ParsedError):
        runpy.run_module(module, run_name="__main__", alter_sys=True)
