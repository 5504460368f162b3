"""Imports fall from floor to floor, never rise, never run in circles."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = {"native": 0, "sampling": 1, "state_pool": 1, "rwkv_batch": 2, "routes": 3, "settings": 4, "app": 4}
OWN = [*FLOORS, "demo", "bench", "test"]


def modules(package: str) -> Iterator[tuple[str, Path]]:
    """Dotted name and file of every module of a package."""
    files = [ROOT / f"{package}.py"] if (ROOT / f"{package}.py").exists() else sorted((ROOT / package).rglob("*.py"))
    for file in files:
        parts = list(file.relative_to(ROOT).with_suffix("").parts)
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), file


def imported(file: Path, *, everywhere: bool) -> Iterator[str]:
    """Dotted names that a file imports; with `everywhere` also inside functions, else only at import time."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree)) if everywhere else list(_at_import(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{file}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _at_import(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from _at_import(node)


@pytest.mark.parametrize("package", FLOORS)
def test_imports_fall(package: str) -> None:
    for name, file in modules(package):
        for target in imported(file, everywhere=True):
            top = target.partition(".")[0]
            if top not in OWN or top == package:
                continue
            allowed = FLOORS.get(top, 99) < FLOORS[package] or (package == "app" and top in ("settings", "demo"))
            assert allowed, f"{name} imports {target}"


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [("routes", {"torch"}), ("rwkv_batch", {"robyn", "json"}), ("sampling", {"robyn"}), ("state_pool", {"robyn"})],
)
def test_what_a_package_does_not_know(package: str, forbidden: set[str]) -> None:
    for name, file in modules(package):
        tops = {target.partition(".")[0] for target in imported(file, everywhere=True)}
        assert not tops & forbidden, f"{name} imports {tops & forbidden}"


def test_the_scheduler_has_no_torch() -> None:
    assert "torch" not in {
        name.partition(".")[0] for name in imported(ROOT / "rwkv_batch/core/scheduler.py", everywhere=True)
    }


def test_no_circles() -> None:
    files = dict(entry for package in FLOORS for entry in modules(package))
    graph = {name: {t for t in imported(file, everywhere=False) if t in files} - {name} for name, file in files.items()}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"a circle: {' -> '.join((*path[path.index(name) :], name))}"
        if name not in done:
            for target in sorted(graph[name]):
                visit(target, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_an_http_worker_loads_no_torch_and_the_supervisor_little() -> None:
    worker = (
        "import sys, routes.serving.worker, routes.serving.http; "
        "print([m for m in ('torch', 'demo', 'sqlite3') if m in sys.modules])"
    )
    supervisor = "import sys, app; print([m for m in ('torch', 'robyn', 'numpy', 'pydantic') if m in sys.modules])"
    for code in (worker, supervisor):
        ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        assert ran.stdout.strip() == "[]"
