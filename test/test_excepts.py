"""Handlers of every exception give a reason, and are few."""

from __future__ import annotations

import ast
from functools import cache

from test.sources import ROOT, source_files

BROAD = {"Exception", "BaseException"}
MAX_HANDLERS = 33
"""Most of them keep a thread alive that others wait for. A dead thread would end its process and all streams in it."""


@cache
def broad_handlers() -> dict[str, str]:
    """Return place -> source line of broad handlers that do not re-raise."""
    found = {}
    for file in source_files():
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ExceptHandler) and (node.type is None or ast.unparse(node.type) in BROAD):
                last = node.body[-1]
                if not (isinstance(last, ast.Raise) and last.exc is None):
                    found[f"{file.relative_to(ROOT)}:{node.lineno}"] = text.splitlines()[node.lineno - 1]
    return found


def test_each_gives_a_reason() -> None:
    silent = [place for place, line in broad_handlers().items() if "  # " not in line]
    assert not silent, (
        "give the reason on the except line (# noqa: BLE001 - reason, if ruff requires it): " + ", ".join(silent)
    )


def test_there_are_few() -> None:
    assert len(broad_handlers()) <= MAX_HANDLERS, (
        "catch named exceptions, or raise MAX_HANDLERS here and give the reason"
    )
