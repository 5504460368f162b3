"""Imports between packages and folders follow a fixed order, without cycles.

Add a new package to FLOORS and a new folder to ROOMS, with the folders that it may import.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = {"native": 0, "sampling": 1, "state_pool": 1, "rwkv_batch": 2, "routes": 3, "programs": 4, "app": 5}
OWN = [*FLOORS, "demo", "bench", "test"]
UPWARDS = {("programs.settings.model_source", "demo"), ("rwkv_batch", "programs")}
"""The two exceptions: the demo model is the default; `from rwkv_batch import LLM` comes from the library."""

MAX_DEPTH = 19
"""Modules in the longest import chain, without UPWARDS."""
MAX_FILES = 22
"""Python files in a folder."""
MAX_LINES = 400
"""Lines of a module."""
MIN_MEDIAN_LINES = 100
WAYS = {"temperature": 12, "session_id": 15, "text_list": 17}
"""Files that a request's value passes, as docs/architecture.md lists them."""

ROOMS = {
    # The engine. Files in no folder are shared types: requests, calls, errors, settings, the tokenizer.
    "rwkv_batch": "",
    "rwkv_batch.core": "rwkv_batch",
    "rwkv_batch.translation": "rwkv_batch",
    "rwkv_batch.tuning": "rwkv_batch rwkv_batch.model rwkv_batch.model.adapters rwkv_batch.model.quant "
    "rwkv_batch.kernels.cpu "
    "rwkv_batch.tuning.gpu",
    "rwkv_batch.tuning.gpu": "rwkv_batch.model rwkv_batch.model.quant rwkv_batch.tuning",
    "rwkv_batch.translation.documents": "rwkv_batch.translation",
    "rwkv_batch.model.quant": "rwkv_batch",
    "rwkv_batch.model.files": "",
    "rwkv_batch.model": "rwkv_batch rwkv_batch.model.files rwkv_batch.model.quant rwkv_batch.model.older",
    "rwkv_batch.model.older": "rwkv_batch.model",
    "rwkv_batch.model.adapters": "rwkv_batch rwkv_batch.model",
    "rwkv_batch.model.rwkv7": "rwkv_batch.model",
    "rwkv_batch.kernels": "rwkv_batch rwkv_batch.model rwkv_batch.model.quant",
    "rwkv_batch.kernels.cpu": "rwkv_batch.kernels rwkv_batch.model rwkv_batch.model.quant",
    "rwkv_batch.kernels.cuda": "rwkv_batch.kernels rwkv_batch.kernels.cuda.w8a8 rwkv_batch.model "
    "rwkv_batch.model.quant",
    "rwkv_batch.kernels.cuda.w8a8": "rwkv_batch.kernels.cuda rwkv_batch.model rwkv_batch.model.quant",
    "rwkv_batch.runner": "rwkv_batch rwkv_batch.runner.graphs rwkv_batch.core "
    "rwkv_batch.model rwkv_batch.model.rwkv7 rwkv_batch.model.quant "
    "rwkv_batch.model.older "
    "rwkv_batch.model.adapters rwkv_batch.kernels rwkv_batch.kernels.cuda",
    "rwkv_batch.runner.graphs": "rwkv_batch rwkv_batch.runner rwkv_batch.core rwkv_batch.model rwkv_batch.kernels.cuda",
    "rwkv_batch.engine_calls": "rwkv_batch rwkv_batch.core rwkv_batch.runner",
    "rwkv_batch.engine": "rwkv_batch rwkv_batch.core rwkv_batch.runner rwkv_batch.engine_calls",
    "rwkv_batch.ipc": "rwkv_batch",
    "rwkv_batch.fleet": "rwkv_batch rwkv_batch.ipc rwkv_batch.fleet.actors",
    "rwkv_batch.fleet.actors": "rwkv_batch rwkv_batch.ipc rwkv_batch.fleet",
    # The pool. Files in no folder are shared by the tiers.
    "state_pool": "",
    "state_pool.disk": "state_pool",
    "state_pool.cache": "state_pool state_pool.disk",
    "state_pool.turns": "state_pool state_pool.disk state_pool.cache",
    "state_pool.session_listing": "state_pool state_pool.disk",
    "state_pool.pool": "state_pool state_pool.disk state_pool.cache state_pool.turns state_pool.session_listing",
    "state_pool.salvage": "state_pool.disk",
    # HTTP. Files in no folder are endpoints, like those in openai.
    "routes.config": "",
    "routes.reader_wakeups": "",
    "routes.context": "routes.api_keys routes.config routes.reader_wakeups routes.file_store",
    "routes.api_keys": "",
    "routes.request_context": "routes.config",
    "routes.file_store": "routes.config",
    "routes.request": "routes.config routes.context routes.file_store routes.request_context",
    "routes.response": "routes.config routes.context routes.request_context routes.reader_wakeups routes.request "
    "routes.file_store",
    "routes.route": "routes.context routes.request routes.response routes.request_context",
    "routes": "routes.context routes.request_context routes.request routes.response routes.route routes.openai "
    "routes.file_store routes.fine_tuning routes.docs",
    "routes.openai": "routes routes.context routes.request_context routes.request routes.response routes.route "
    "routes.file_store routes.fine_tuning",
    "routes.fine_tuning": "routes.context routes.request_context routes.request routes.response routes.route "
    "routes.openai routes.file_store",
    "routes.anthropic": "routes.context routes.request_context routes.request routes.response routes.route "
    "routes.openai",
    "routes.llama_cpp": "routes.context routes.request routes.response routes.route routes.openai",
    "routes.ollama": "routes routes.context routes.request routes.response routes.route routes.openai",
    "routes.translation": "routes.context routes.request_context routes.request routes.response routes.route "
    "routes.openai routes.file_store",
    "routes.docs": "routes.context routes.request routes.response routes.route",
    "routes.table": "routes routes.route routes.openai routes.ollama routes.anthropic routes.llama_cpp "
    "routes.translation routes.fine_tuning",
    "routes.reference": "routes.docs routes.table",
    # Programs and the library.
    "programs": "",
    "programs.settings": "",
    "programs.backends": "programs programs.settings",
    "programs.backup": "programs programs.settings",
    "programs.batch.inputs": "programs",
    "programs.batch.formats": "programs programs.batch.inputs",
    "programs.batch": "programs programs.backends programs.settings programs.batch.inputs programs.batch.formats",
    "programs.chat": "programs programs.backends programs.batch programs.settings",
    "programs.library": "programs programs.backends programs.settings",
    "programs.tune": "programs programs.settings",
    "programs.tools": "programs.settings",
    "programs.serve": "programs programs.settings programs.serve.batches",
    "programs.serve.batches": "programs programs.backends programs.batch programs.batch.inputs programs.batch.formats",
    "routes.serving": "routes routes.api_keys routes.config routes.context "
    "routes.request_context routes.request routes.response routes.route routes.file_store routes.openai routes.ollama "
    "routes.anthropic routes.llama_cpp routes.docs routes.table",
}
"""Folder -> folders of the same level that it may import. A file belongs to the longest matching name."""

UNKNOWN = {
    "routes": {"torch"},
    "rwkv_batch": {"robyn", "json", "sqlite3"},
    "rwkv_batch.core": {"torch"},
    "rwkv_batch.ipc": {"torch"},
    "rwkv_batch.translation": {"torch", "robyn", "pydantic"},
    "rwkv_batch.fleet": {"torch"},
    "sampling": {"robyn", "sqlite3"},
    "state_pool": {"robyn", "torch"},
    "programs": {"torch", "robyn"},
    "app": {"sqlite3"},
}
"""Package or folder -> modules that none of its files imports, even inside a function."""


def modules(package: str) -> Iterator[tuple[str, Path]]:
    """Yield the dotted name and file of every module of a package."""
    files = [ROOT / f"{package}.py"] if (ROOT / f"{package}.py").exists() else sorted((ROOT / package).rglob("*.py"))
    for file in files:
        parts = list(file.relative_to(ROOT).with_suffix("").parts)
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), file


@cache
def imported(file: Path) -> frozenset[str]:
    """Return the dotted names that a file imports. Imports in functions and for type checkers are included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{file}: relative import"
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(found)


@cache
def known_modules() -> frozenset[str]:
    """Return the dotted names of all product and bench modules."""
    return frozenset(name for package in (*FLOORS, "bench") for name, _ in modules(package))


@cache
def imported_modules(file: Path) -> frozenset[str]:
    """Return the modules of this project that a file imports; resolves `from a import b`."""
    found = imported(file) & known_modules()
    packages = {name for name in found if any(other.startswith(f"{name}.") for other in found)}
    return frozenset(found - packages)


def room_of(name: str) -> str:
    """Return the folder of a module: the longest matching name in ROOMS."""
    parts = name.split(".")
    prefixes = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in ROOMS), "")


@pytest.mark.parametrize("package", FLOORS)
def test_imports_fall(package: str) -> None:
    for name, file in modules(package):
        for target in imported(file):
            top = target.partition(".")[0]
            if top not in OWN or top == package:
                continue
            allowed = FLOORS.get(top, 99) < FLOORS[package] or (name, top) in UPWARDS
            assert allowed, f"{name} imports {target}"


@pytest.mark.parametrize("package", sorted({room.partition(".")[0] for room in ROOMS}))
def test_a_room_knows_only_the_rooms_it_names(package: str) -> None:
    for name, file in modules(package):
        room = room_of(name)
        allowed = {room, *ROOMS[room].split()}
        for target in imported_modules(file):
            if target.partition(".")[0] == package:
                assert room_of(target) in allowed, f"{name} (room {room}) imports {target} (room {room_of(target)})"


def test_every_folder_is_a_room_or_a_package_without_any() -> None:
    with_rooms = {room.partition(".")[0] for room in ROOMS}
    for package in with_rooms:
        folders = {".".join(file.relative_to(ROOT).parent.parts) for _, file in modules(package)}
        assert folders - {package} <= set(ROOMS), f"add the allowed imports of these to ROOMS: {folders - set(ROOMS)}"


@pytest.mark.parametrize("place", UNKNOWN)
def test_what_a_place_does_not_know(place: str) -> None:
    for name, file in modules(place.partition(".")[0]):
        if name == place or name.startswith(f"{place}."):
            tops = {target.partition(".")[0] for target in imported(file)}
            assert not tops & UNKNOWN[place], f"{name} imports {tops & UNKNOWN[place]}"


def test_what_measuring_programs_share_knows_none_of_them() -> None:
    for name, file in modules("bench"):
        if name.startswith("bench.tools."):
            known = {target for target in imported(file) if target.startswith("bench.")}
            assert all(target.startswith("bench.tools") for target in known), f"{name} imports {known}"


def test_sqlite_is_known_in_few_places() -> None:
    places = {"state_pool.disk", "programs.batch.sidecar", "routes.file_store", "routes.translation.stored"}
    for package in FLOORS:
        for name, file in modules(package):
            known = "sqlite3" in {target.partition(".")[0] for target in imported(file)}
            assert not known or {name, room_of(name), name.partition(".")[0]} & places, f"{name} imports sqlite3"


def test_ray_is_known_in_one_place() -> None:
    for package in FLOORS:
        for name, file in modules(package):
            known = "ray" in {target.partition(".")[0] for target in imported(file)}
            assert not known or name.startswith("rwkv_batch.fleet.actors."), f"{name} imports ray"


def test_no_dialect_names_a_backend() -> None:
    """The operator chooses sampler and kernels. Only /v2 prefers a sampler, as its interface requires."""
    backends = {"rapid", "flashinfer", "naive", "cuda", "cpu"}
    for name, file in modules("routes"):
        constants = {node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)}
        named = constants & backends
        assert named <= ({"flashinfer"} if name == "routes.native_completions" else set()), f"{name} names {named}"


def test_the_engine_names_no_route() -> None:
    routes = {"big_batch", "openai", "translate", "multi_state", "fim", "batch-FIM"}
    for package in ("rwkv_batch", "state_pool", "sampling"):
        for name, file in modules(package):
            nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)]
            named = {node.value for node in nodes} & routes
            named -= (
                {"translate"} if room_of(name) == "rwkv_batch.translation.documents" else set()
            )  # XLIFF's attribute
            assert not named, f"{name} names {named}"


def test_no_circles() -> None:
    files = dict(entry for package in (*FLOORS, "bench") for entry in modules(package))
    graph = {name: imported_modules(file) - {name} for name, file in files.items()}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"import cycle: {' -> '.join((*path[path.index(name) :], name))}"
        if name not in done:
            for target in sorted(graph[name]):
                visit(target, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_import_chains_are_short() -> None:
    files = dict(entry for package in FLOORS for entry in modules(package))

    @cache
    def chain(name: str) -> tuple[str, ...]:
        targets = imported_modules(files[name]) - {name}
        below = (chain(target) for target in targets if (name, target.partition(".")[0]) not in UPWARDS)
        return (name, *max(below, key=len, default=()))

    longest = max((chain(name) for name in files), key=len)
    assert len(longest) <= MAX_DEPTH, f"{len(longest)} modules: {' -> '.join(longest)}"


def test_folders_and_modules_are_of_a_readable_size() -> None:
    files = [file for package in FLOORS for _, file in modules(package)]
    folders = Counter(file.parent for file in files)
    assert not {folder.relative_to(ROOT): count for folder, count in folders.items() if count > MAX_FILES}
    lines = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in files}
    assert not {file.relative_to(ROOT): count for file, count in lines.items() if count > MAX_LINES}
    assert median(count for file, count in lines.items() if file.name != "__init__.py") >= MIN_MEDIAN_LINES


@pytest.mark.parametrize("value", WAYS)
def test_the_ways_of_values_are_short_and_only_fall(value: str) -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    shared, *lists = page.split("## Three values through the files")[1].split("\n## ")[0].split("\n- ")
    own = next(one for one in lists if one.startswith(f"`{value}`")).split(". `")[0]
    every_job, files = (re.findall(r"`(\S+/\S+)`", text) for text in (shared, own))
    assert not [file for file in (*every_job, *files) if not (ROOT / file).is_file()]
    floors = [FLOORS[file.partition("/")[0]] for file in files]
    assert len(every_job) + len(files) <= WAYS[value] and floors == sorted(floors, reverse=True)


@pytest.mark.parametrize(
    ("imports", "absent"),
    [
        ("app", {"torch", "robyn", "numpy", "pydantic", "asyncio", "routes.context"}),
        ("rwkv_batch, rwkv_batch.request", {"programs", "app", "pydantic", "torch"}),
        (
            "rwkv_batch.core.job_table, rwkv_batch.core.session_transfer, rwkv_batch.ipc.server",
            {"torch", "robyn", "llguidance"},
        ),
    ],
)
def test_what_is_not_loaded_with_it(imports: str, absent: set[str]) -> None:
    assert printed(f"import sys, {imports}; print(*({absent!r} & sys.modules.keys()))") == ""


def test_http_workers_are_forked_with_all_validators_and_without_large_packages() -> None:
    absent = {"torch", "numpy", "lxml", "rapidfuzz", "llguidance", "demo", "programs"}
    code = f"""import sys, routes.serving.worker as worker
models = [model for route in worker.ROUTES for model in (route.body, route.query) if model is not None]
print(*({absent!r} & sys.modules.keys()), *(model for model in models if not model.__pydantic_complete__))"""
    assert printed(code) == ""


def printed(code: str) -> str:
    """Return the output of a Python program."""
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return ran.stdout.strip()
