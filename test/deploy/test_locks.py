"""requirements/: locks contain the listed packages with hashes; every package has a licence in the table."""

from __future__ import annotations

import re

import pytest

from test.serving import ROOT

LOCKS = ROOT / "requirements"
OF_LIST = {
    "requirements.txt": ["cpu", "cuda"],
    "requirements-nvcc.txt": ["nvcc"],
    "requirements-gpu.txt": ["gpu"],
    "requirements-cluster.txt": ["cpu cluster", "gpu cluster"],
    "requirements-dev.txt": ["cpu dev"],
    "requirements-release.txt": ["release"],
}


def entries(lock: str) -> dict[str, str]:
    """Return package -> its text, for a lock and its included locks."""
    text = (LOCKS / f"{lock}.lock").read_text("utf-8")
    found = {name: whole for whole, name in re.findall(r"^(([a-z][\w.-]*)==(?:.*\\\n)+.*)$", text, re.MULTILINE)}
    for named in re.findall(r"^-r (\w+)\.lock$", text, re.MULTILINE):
        found = {**entries(named), **found}
    return found


def pins(list_: str) -> dict[str, str]:
    """Return package -> version, for a list and its included lists."""
    text = (ROOT / list_).read_text("utf-8")
    found = dict(re.findall(r"^([\w.-]+)(?:\[\w+\])?==(\S+)$", text, re.MULTILINE))
    for named in re.findall(r"^-r (\S+)$", text, re.MULTILINE):
        found |= pins(named)
    return found


def test_every_list_has_a_lock() -> None:
    assert {path.name for path in ROOT.glob("requirements*.txt")} == set(OF_LIST)
    named = {lock for sets in OF_LIST.values() for set_ in sets for lock in set_.split()}
    assert {path.stem for path in LOCKS.glob("*.lock")} == named | {"common"}


@pytest.mark.parametrize(("list_", "locks"), [(list_, set_) for list_, sets in OF_LIST.items() for set_ in sets])
def test_a_lock_has_the_versions_of_its_list_with_hashes(list_: str, locks: str) -> None:
    locked: dict[str, str] = {}
    for lock in locks.split():
        locked |= entries(lock)
    expected = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins(list_).items()}
    assert expected
    for name, version in expected.items():
        pinned = re.match(r"\S+==([^+\s]+)", locked.get(name, ""))
        assert pinned and pinned[1] == version, f"{name}=={version} of {list_} is not in {locks}: make lock"
    for text in locked.values():
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", text), text


def test_the_cpu_set_has_nothing_of_cuda() -> None:
    names = set(entries("cpu"))
    assert "torch" in names and not [name for name in names if name.startswith(("nvidia", "cuda", "triton"))]
    assert {"triton", "nvidia-cudnn-cu13"} <= set(entries("cuda"))


def test_every_package_has_a_licence_in_the_table() -> None:
    table = (LOCKS / "licences.md").read_text("utf-8")
    named = dict(re.findall(r"^\| (\S+) \| \S+ \| (.+) \|$", table, re.MULTILINE))
    service = {**entries("gpu"), **entries("cluster"), **entries("cpu")}
    other_systems = {name for name, text in service.items() if "win32'" in text.partition("\\")[0]}
    assert set(service) - set(named) - other_systems == set()
    assert not {name for name in service if re.search(r"\bA?GPL", named.get(name, ""))}
