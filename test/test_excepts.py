"""A place that catches everything says why beside it, and is one of few."""

from __future__ import annotations

import ast

from test.sources import ROOT, source_files

BROAD = {"Exception", "BaseException"}
MOST = 31
"""Most of them keep a thread alive for which somebody waits. A thread that dies ends its process, so that what Ray
raises on one engine's link is caught there: the other engines' streams are in the same process."""


def broad_handlers() -> dict[str, str]:
    """Place -> the line, of handlers of everything that do not raise it again."""
    found = {}
    for file in source_files():
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ExceptHandler) and (node.type is None or ast.unparse(node.type) in BROAD):
                last = node.body[-1]
                if not (isinstance(last, ast.Raise) and last.exc is None):
                    found[f"{file.relative_to(ROOT)}:{node.lineno}"] = text.splitlines()[node.lineno - 1]
    return found


def test_each_says_why() -> None:
    silent = [place for place, line in broad_handlers().items() if "  # " not in line]
    assert not silent, "say why beside the except (# noqa: BLE001 - reason, where ruff wants it): " + ", ".join(silent)


def test_there_are_few() -> None:
    assert len(broad_handlers()) <= MOST, "catch what can be named, or say in this test why one more is needed"
