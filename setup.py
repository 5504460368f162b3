"""Builds the wheel: one package, rwkv_batch, which holds app.py and all other folders of the tree.

The tree imports `sampling.params`, the wheel `rwkv_batch.sampling.params`. The names are inserted where Python's own
parser finds an import, or a string with the dotted name of one of our modules. Nothing else of a line changes.
Editable installs keep the tree's names.

Two variables make a platform's wheel: PREBUILT, the folder of its compiled libraries, and PLATFORM, its tag.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from setuptools import find_namespace_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
HOME = "rwkv_batch"
MOVED = ("bench", "demo", "native", "programs", "routes", "sampling", "state_pool")
LEFT_OUT = ["bench.results*", "*.__pycache__*"]
IS_EDITABLE = "editable_wheel" in sys.argv or "develop" in sys.argv


def packages() -> list[str]:
    """The tree's packages; each folder with sources or data is one."""
    names = [f"{top}{rest}" for top in (HOME, *MOVED) for rest in ("", ".*")]
    return find_namespace_packages(str(ROOT), exclude=LEFT_OUT, include=names)


def extras() -> dict[str, list[str]]:
    """requirements-NAME.txt as an extra of that name; gpu brings nvcc too."""
    texts = {name: (ROOT / f"requirements-{name}.txt").read_text("utf-8") for name in ("nvcc", "gpu", "cluster")}
    found = {name: [line for line in text.splitlines() if line[:1].isalpha()] for name, text in texts.items()}
    return {**found, "gpu": found["gpu"] + found["nvcc"]}


def modules() -> set[str]:
    """Dotted names of the modules that move."""
    files = [ROOT / "app.py", *(file for top in MOVED for file in (ROOT / top).rglob("*.py"))]
    names = {".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files}
    return {name for one in names if "." in (name := one.removesuffix(".__init__"))}


def moved_source(source: bytes, known: set[str], file: str) -> bytes:
    """A module's source with our imports under HOME. Raises ValueError for an import that cannot move."""
    lines = source.splitlines(keepends=True)
    for line, column in sorted(places(ast.parse(source), lines, known, file), reverse=True):
        text = lines[line - 1]
        lines[line - 1] = text[:column] + f"{HOME}.".encode() + text[column:]
    return b"".join(lines)


def places(tree: ast.Module, lines: list[bytes], known: set[str], file: str) -> Iterator[tuple[int, int]]:
    """Line and byte where HOME goes in."""
    tops = {*MOVED, "app"}
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] in tops:
            module = str(node.module).encode()
            yield node.lineno, lines[node.lineno - 1].index(module, node.col_offset + len("from "))
        elif isinstance(node, ast.Import):
            for alias in (alias for alias in node.names if alias.name.partition(".")[0] in tops):
                if alias.asname is None and alias.name.partition(".")[0] in used:
                    raise ValueError(f"{file}:{node.lineno}: import {alias.name}: write `from ... import ...`")
                yield alias.lineno, alias.col_offset
        elif isinstance(node, ast.Constant) and node.value in known:
            name = str(node.value).encode()
            if not lines[node.lineno - 1][node.col_offset :].startswith((b'"' + name, b"'" + name)):
                raise ValueError(f"{file}:{node.lineno}: write the module's name {node.value} as a plain string")
            yield node.lineno, node.col_offset + 1


def commit() -> str:
    """The commit that is built: of SOURCE_COMMIT, for trees without git, or of the clone."""
    if given := os.environ.get("SOURCE_COMMIT"):
        return given
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    if not (ROOT / ".git").exists():
        return ""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


class Build(build_py):
    """Moves app.py and the imports, and notes the commit."""

    def run(self) -> None:
        if self.editable_mode:
            super().run()
            return
        shutil.rmtree(self.build_lib, ignore_errors=True)  # else files that the tree no longer has stay in
        super().run()
        home = Path(self.build_lib, HOME)
        self.copy_file(str(ROOT / "app.py"), str(home / "app.py"))
        known = modules()
        for file in [*home.rglob("*.py"), *home.rglob("*.pyi")]:
            file.write_bytes(moved_source(file.read_bytes(), known, str(file)))
        version = home / "version.py"
        version.write_text(version.read_text("utf-8").replace('COMMIT = ""', f'COMMIT = "{commit()}"'), "utf-8")
        if prebuilt := os.environ.get("PREBUILT"):
            self.copy_tree(prebuilt, str(home / "native" / "prebuilt"))


class Wheel(bdist_wheel):
    """Of the platform that PLATFORM names, else of any. Each is for all versions of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", os.environ.get("PLATFORM", "any")


def main() -> None:
    """Run setuptools; everything else is in pyproject.toml."""
    if IS_EDITABLE:
        scripts = {"console_scripts": ["rwkv-batch=app:run"]}
        setup(packages=packages(), py_modules=["app"], entry_points=scripts, extras_require=extras())
        return
    places_ = {HOME: HOME, **{f"{HOME}.{top}": top for top in MOVED}}
    names = [name if name.partition(".")[0] == HOME else f"{HOME}.{name}" for name in packages()]
    assert len(set(names)) == len(names), "a folder of the tree has the name of one in rwkv_batch"
    scripts = {"console_scripts": [f"rwkv-batch={HOME}.app:run"]}
    own = {"package_dir": places_, "py_modules": [], "cmdclass": {"build_py": Build, "bdist_wheel": Wheel}}
    setup(packages=names, entry_points=scripts, extras_require=extras(), **own)


if __name__ == "__main__":
    main()
