"""What documents name is there: files of the tree by path, folders in the architecture's tree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    "README.md",
    "README.zh-CN.md",
    "CONTRIBUTING.md",
    *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
]
PACKAGES = "routes|rwkv_batch|state_pool|bulk|library|sampling|native|supervisor|docs|bench|test"
PLACE = re.compile(rf"`((?:{PACKAGES})/[\w./]*)`")


@pytest.mark.parametrize("document", sorted(DOCUMENTS))
def test_named_files_are_there(document: str) -> None:
    named = set(PLACE.findall((ROOT / document).read_text(encoding="utf-8")))
    assert not sorted(path for path in named if not (ROOT / path).exists())


def test_the_architecture_names_every_folder() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    packages = ("routes", "rwkv_batch", "state_pool", "bulk")
    folders = {path.parent.name for package in packages for path in (ROOT / package).glob("*/__init__.py")}
    assert not sorted(folder for folder in folders if f"  {folder}/" not in text)
