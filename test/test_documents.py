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
    *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
]
MAX_PAGES = 14
"""Pages in docs/, without their Chinese versions."""
TRIES = "docs/tries.md"
"""Names files and programs that are gone."""
FOLDERS = "|".join(sorted(path.name for path in ROOT.iterdir() if path.is_dir() and path.name.isidentifier()))
PLACE = re.compile(rf"`((?:{FOLDERS})/[\w./-]*)`")
FILES_OF_A_FOLDER = re.compile(r"`([\w./]+/)`: ((?:`\w+\.py`(?:, | and )?)+)")
PROGRAM = re.compile(r"python -m ([a-z][\w.]*\w)")
RECORD = re.compile(r"`(?:bench/results/)?([\w*][\w.*-]*\.json)`")
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")
CONFLICT = re.compile(r"^(?:<{7}|={7}|>{7})(?: |$)", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
NO_RECORDS = {
    "compiled.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "adapter_config.json",
    "rwkv_sessions.db.adapters.json",
}
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
    if document != TRIES:
        named |= {folder + name for folder, names in FILES_OF_A_FOLDER.findall(text) for name in names.split("`")[1::2]}
    assert not sorted(path for path in named if not (ROOT / path).exists())


@documents
def test_no_merge_conflict_is_left(document: str) -> None:
    assert not CONFLICT.findall(text_of(document))


@documents
def test_named_programs_are_there(document: str) -> None:
    if document == TRIES:
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
    for path, heading in LINK.findall(FENCE.sub("", text_of(document))):
        target = (ROOT / document).parent / path if path else ROOT / document
        if not target.exists() or (heading and target.suffix == ".md" and heading not in headings(target)):
            lost.append(f"{path}#{heading}")
    assert not lost


def test_the_architecture_names_every_folder() -> None:
    text = text_of("docs/architecture.md")
    packages = ("routes", "rwkv_batch", "state_pool", "programs")
    folders = {path.parent.name for package in packages for path in (ROOT / package).glob("*/__init__.py")}
    assert not sorted(folder for folder in folders if f"  {folder}/" not in text)


def test_there_are_few_pages_and_all_are_in_the_sites_menu() -> None:
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert len([page for page in pages if "/" not in page]) <= MAX_PAGES
    menu = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE))
    outside = set(re.findall(r'"([\w/-]+\.md)": "', (ROOT / "docs/site_hooks.py").read_text("utf-8")))
    assert menu == pages | outside


@documents
def test_pages_are_short(document: str) -> None:
    text = text_of(document)
    if limit := {"README.md": 130, "README.zh-CN.md": 130, "CONTRIBUTING.md": 120, TRIES: 300}.get(document):
        assert len(text.splitlines()) <= limit
    if document == "docs/architecture.md":
        assert len(text.split()) <= 1800
