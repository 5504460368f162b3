"""The product's source files, for tests of their style."""

from __future__ import annotations

from pathlib import Path

from test.test_imports import FLOORS

ROOT = Path(__file__).resolve().parent.parent


def source_files() -> list[Path]:
    """Return every Python file of the product, in no order."""
    places = [ROOT / name for name in FLOORS]
    return [
        file for place in places for file in (place.rglob("*.py") if place.is_dir() else [place.with_suffix(".py")])
    ]
