"""Terms with a required translation.

If an answer lacks a term, the request is repeated with the translations inserted into the text. A model that reads
"the 状态池 keeps" mostly keeps the word. A term that is still missing is reported in the error file.
"""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

from programs.record import RunError


class Glossary:
    """Terms and their translations. The longest matching term wins."""

    def __init__(self, terms: dict[str, str]) -> None:
        self._terms = {term.casefold(): target for term, target in terms.items()}
        written = {*terms, *self._terms}  # the folded form of "Straße" matches neither "Straße" nor "STRASSE"
        longest_first = sorted(written, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(_term_pattern, longest_first)), re.IGNORECASE) if terms else None

    def terms_in(self, text: str) -> dict[str, str]:
        """Returns the terms of a text with their translations."""
        if self._pattern is None:
            return {}
        found = ((term, self._target(term)) for term in self._pattern.findall(text))
        return {term: target for term, target in found if target is not None}

    def _target(self, found: str) -> str | None:
        """Returns the translation of a match, or None. The pattern matches "İ" for "i" too."""
        return self._terms.get(found.casefold())

    def missing(self, text: str, answer: str) -> dict[str, str]:
        """Returns the terms whose translation is missing in the answer. Ignores case."""
        answer_text = answer.casefold()
        return {term: target for term, target in self.terms_in(text).items() if target.casefold() not in answer_text}

    def apply(self, text: str) -> str:
        """Returns the text with its terms replaced by their translations."""
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda found: self._target(found.group()) or found.group(), text)


def _term_pattern(term: str) -> str:
    """Returns a term's pattern. It matches whole words in scripts that separate words."""
    left = r"\b" if term[0].isascii() and term[0].isalnum() else ""
    right = r"\b" if term[-1].isascii() and term[-1].isalnum() else ""
    return left + re.escape(term) + right


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
        terms = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RunError(f"--glossary {path} is not JSON: {error}") from None
    good = isinstance(terms, dict) and all(term.strip() and isinstance(to, str) and to for term, to in terms.items())
    if not good:
        raise RunError(f'--glossary {path} must be an object like {{"term": "translation"}}')
    return dict(terms)
