"""Reads glossaries: files of terms with a required translation."""

from __future__ import annotations

import csv
from pathlib import Path

import msgspec

from programs.record import RunError
from rwkv_batch.translation.glossary import Glossary


def load_glossary(path: str) -> Glossary:
    """Reads a glossary: JSON `{"term": "translation"}`, CSV or TSV with two columns. Raises RunError."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"--glossary {path} cannot be read: {error}") from None
    if path.endswith(".json"):
        return Glossary(_parse_json(path, text))
    delimiter = "\t" if path.endswith(".tsv") else ","
    try:
        rows = [row for row in csv.reader(text.split("\n"), delimiter=delimiter) if row]
    except csv.Error as error:
        raise RunError(f"--glossary {path} is not a table of two columns: {error}") from None
    wrong = next((row for row in rows if len(row) != 2 or not all(cell.strip() for cell in row)), None)
    if wrong is not None:
        raise RunError(f"--glossary {path} must have a term and its translation in each line, got {wrong}")
    return Glossary({term.strip(): target.strip() for term, target in rows})


def _parse_json(path: str, text: str) -> dict[str, str]:
    try:
        terms = msgspec.json.decode(text, type=dict[str, str])
    except (msgspec.DecodeError, RecursionError) as error:
        raise RunError(f'--glossary {path} must be JSON like {{"term": "translation"}}: {error}') from None
    if empty := next((one for one in terms.items() if not (one[0].strip() and one[1])), None):
        raise RunError(f"--glossary {path} has an empty term or translation: {empty[0]!r}: {empty[1]!r}; remove it")
    return terms
