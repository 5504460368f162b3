"""Mutants of `[tool.mutmut]` in pyproject.toml, made by mutmut."""

from __future__ import annotations

import ast
import difflib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass
class Mutant:
    """A mutant: its name, its file and the text of the mutated file."""

    name: str
    path: str
    text: str = ""


@cache
def scope_files() -> list[str]:
    """Return the files of `[tool.mutmut]`."""
    from mutmut.configuration import config

    files = (file for pattern in config().only_mutate for file in ROOT.glob(pattern) if file.suffix == ".py")
    return sorted(str(file.relative_to(ROOT)) for file in files)


def test_paths() -> list[str]:
    """Return the tests of `[tool.mutmut]`."""
    from mutmut.configuration import config

    return config().pytest_add_cli_args_test_selection


@cache
def original(path: str) -> str:
    return (ROOT / path).read_text()


def diff(mutant: Mutant) -> str:
    before, after = original(mutant.path).splitlines(True), mutant.text.splitlines(True)
    return "".join(difflib.unified_diff(before, after, f"a/{mutant.path}", f"b/{mutant.path}"))


def statement_lines(mutant: Mutant) -> set[int]:
    """Return the lines of the changed statement.

    Leaves out the lines of statements inside it. For a function's head: the lines of its body.
    """
    before, after = original(mutant.path).splitlines(), mutant.text.splitlines()
    changed = next((place for place, pair in enumerate(zip(before, after, strict=False), 1) if pair[0] != pair[1]), 1)
    inner = ast.parse(original(mutant.path))
    node: ast.AST = inner
    while inside := [one for one in _statements(node) if one.lineno <= changed <= (one.end_lineno or 0)]:
        node = inside[0]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return set(range(node.body[0].lineno, (node.end_lineno or 0) + 1))
    if not isinstance(node, ast.stmt):
        return {changed}
    children = list(_statements(node))
    first = max([node.lineno, *((one.end_lineno or 0) + 1 for one in children if one.lineno < changed)])
    last = min([node.end_lineno or changed, *(one.lineno - 1 for one in children if one.lineno > changed)])
    return set(range(first, last + 1)) | ({node.lineno} if isinstance(node, ast.Match) else set())


def _statements(node: ast.AST) -> Iterable[ast.stmt]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        else:
            yield from _statements(child)


def mutations(path: str) -> list[tuple[str, Any, Any]]:
    """Return a file's mutants: names, and what makes the text."""
    from mutmut.mutation import file_mutation as maker

    module, found, *_ = maker.create_mutations(path, original(path))
    names = _function_names(module)
    counts: Counter[str] = Counter()
    mutants = []
    for one in found:
        if (function := names.get(one.contained_by_top_level_function)) is not None:
            counts[function] += 1
            mutants.append((f"{path}:{function}#{counts[function]}", module, one))
    return mutants


def _function_names(module: Any) -> dict[Any, str]:
    import libcst

    names = {}
    for outer in module.body:
        if isinstance(outer, libcst.FunctionDef):
            names[outer] = outer.name.value
        elif isinstance(outer, libcst.ClassDef) and isinstance(outer.body, libcst.IndentedBlock):
            inner = (one for one in outer.body.body if isinstance(one, libcst.FunctionDef))
            names |= {one: f"{outer.name.value}.{one.name.value}" for one in inner}
    return names


def mutant_names(path: str) -> list[str]:
    return [name for name, *_ in mutations(path)]


def make_mutants(path: str, names: set[str]) -> list[Mutant]:
    from mutmut.mutation import file_mutation as maker

    return [
        Mutant(name, path, maker.deep_replace(module, one.original_node, one.mutated_node).code)  # type: ignore[union-attr]
        for name, module, one in mutations(path)
        if name in names
    ]
