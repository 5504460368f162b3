"""Terms with a required translation.

If an answer lacks a term, the text is translated again with the translations inserted. A model that reads "the 状态池
keeps" mostly keeps the word.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from rwkv_batch.translation.markers import pattern_of


class Glossary:
    """Terms and their translations. The longest matching term wins."""

    def __init__(self, terms: Mapping[str, str]) -> None:
        self.terms = terms
        self._terms = {term.casefold(): target for term, target in terms.items()}
        written = {*map(str.lower, terms), *self._terms}  # the folded "strasse" does not match "Straße"
        written |= {term for term in terms if len(term.lower()) != len(term)}  # "İ" becomes two characters
        self._pattern = re.compile(pattern_of(written), re.IGNORECASE) if terms else None

    def terms_in(self, text: str) -> dict[str, str]:
        """Return the terms of a text with their translations."""
        if self._pattern is None:
            return {}
        found = ((term, self._target(term)) for term in self._pattern.findall(text))
        return {term: target for term, target in found if target is not None}

    def _target(self, found: str) -> str | None:
        """Return the translation of a match, or None. The pattern matches "İ" for "i" too."""
        return self._terms.get(found.casefold())

    def missing(self, text: str, answer: str) -> dict[str, str]:
        """Return the terms whose translation is missing in the answer. Ignores case."""
        answer_text = answer.casefold()
        return {term: target for term, target in self.terms_in(text).items() if target.casefold() not in answer_text}

    def apply(self, text: str) -> str:
        """Return the text with its terms replaced by their translations."""
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda found: self._target(found.group()) or found.group(), text)
