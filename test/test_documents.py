"""What documents name is there: files of the tree, programs, records, headings that links lead to."""

from __future__ import annotations

import re
from fnmatch import filter as matching
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    "README.md",
    "README.zh-CN.md",
    "CONTRIBUTING.md",
    "bench/results/README.md",
    *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
]
NOTEBOOK = "docs/notebook.md"
"""Tells of what was, files that are gone included."""
FOLDERS = "|".join(sorted(path.name for path in ROOT.iterdir() if path.is_dir() and path.name.isidentifier()))
PLACE = re.compile(rf"`((?:{FOLDERS})/[\w./-]*)`")
FILES_OF_A_FOLDER = re.compile(r"`([\w./]+/)`: ((?:`\w+\.py`(?:, | and )?)+)")
PROGRAM = re.compile(r"python -m ([a-z][\w.]*\w)")
RECORD = re.compile(r"`(?:bench/results/)?([\w*][\w.*-]*\.json)`")
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")
NO_RECORDS = {"model.safetensors.index.json", "adapter_config.json"}
OTHERS = {"pytest", "venv", "pip"}
"""Programs that are not ours."""

documents = pytest.mark.parametrize("document", sorted(DOCUMENTS))


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def headings(document: Path) -> set[str]:
    """What links to its headings end with."""
    lines = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).strip().replace(" ", "-") for line in lines}


@documents
def test_named_files_are_there(document: str) -> None:
    text = text_of(document)
    named = set(PLACE.findall(text))
    if document != NOTEBOOK:
        named |= {folder + name for folder, names in FILES_OF_A_FOLDER.findall(text) for name in names.split("`")[1::2]}
    assert not sorted(path for path in named if not (ROOT / path).exists())


@documents
def test_named_programs_are_there(document: str) -> None:
    if document == NOTEBOOK:
        return
    named = set(PROGRAM.findall(text_of(document))) - OTHERS
    places = {name: ROOT / name.replace(".", "/") for name in named}
    assert not sorted(
        name for name, at in places.items() if not at.with_suffix(".py").exists() and not (at / "__main__.py").exists()
    )


@documents
def test_named_records_are_there(document: str) -> None:
    names = set(RECORD.findall(text_of(document))) - NO_RECORDS
    there = [path.name for path in (ROOT / "bench/results").iterdir()]
    assert not sorted(name for name in names if not matching(there, name))


@documents
def test_links_lead_somewhere(document: str) -> None:
    lost = []
    for path, heading in LINK.findall(text_of(document)):
        target = (ROOT / document).parent / path if path else ROOT / document
        if not target.exists() or (heading and target.suffix == ".md" and heading not in headings(target)):
            lost.append(f"{path}#{heading}")
    assert not lost


def test_the_architecture_names_every_folder() -> None:
    text = text_of("docs/architecture.md")
    packages = ("routes", "rwkv_batch", "state_pool", "programs")
    folders = {path.parent.name for package in packages for path in (ROOT / package).glob("*/__init__.py")}
    assert not sorted(folder for folder in folders if f"  {folder}/" not in text)
