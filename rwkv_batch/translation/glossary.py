"""Terms with a required translation.

The translations are inserted into the text of the prompt. A model that reads "the 状态池 keeps" mostly keeps the word.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum

import msgspec

from rwkv_batch.translation.markers import pattern_of
from sampling.grammar.constraint import RequiredText

_MAX_ENFORCED = 64
"""Terms per text."""


class GlossaryMode(StrEnum):
    """What is done about a glossary's terms."""

    HINT = "hint"
    """The prompt has the translations."""
    CHECK = "check"
    """A text whose translation lacks one is translated again, with the translations in the prompt."""
    ENFORCE = "enforce"
    """The prompt has the translations, and the sampler ends no text without them."""


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
        terms = self.terms_in(text).items()
        return {term: to for term, to in terms if not any(form.casefold() in answer_text for form in forms_of(to))}

    def lack(self, text: str, answer: str) -> str:
        """Return the terms whose translation is missing, like "the term row = Zeile". "": none."""
        pairs = [f"{term} = {to}" for term, to in self.missing(text, answer).items()]
        return f"the term{'s' if len(pairs) > 1 else ''} {', '.join(pairs)}" if pairs else ""

    def apply(self, text: str) -> str:
        """Return the text with terms replaced by their first translations."""
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda found: forms_of(self._target(found.group()) or found.group())[0], text)


def forms_of(target: str) -> tuple[str, ...]:
    """Return the forms of a translation like `Katze | Katzen`."""
    return tuple(form for part in target.split(" | ") if (form := part.strip())) or (target,)


def enforced(required: RequiredText | None, targets: Iterable[str]) -> RequiredText | None:
    """Add translations that an answer must have. Forms with characters of markers are left out."""
    required = required or RequiredText()
    barred = {*required.leads, "\n"}
    words = (tuple(form for form in forms_of(target) if barred.isdisjoint(form)) for target in targets)
    added = [(forms, 1) for forms in words if forms][:_MAX_ENFORCED]
    found = msgspec.structs.replace(required, words=(*required.words, *added))
    return found if found != RequiredText() else None


_FULL_STOP = r"""[.。!?！？…]+["'”’»」』）)]*"""


def before_full_stop(answer: str, required: RequiredText) -> str:
    """Return an answer with the words after its last full stop before it. The sampler adds missing words there."""
    forms = "|".join(re.escape(form) for forms, _ in required.words for form in forms)
    return re.sub(rf"(?<=\w)({_FULL_STOP})((?:\s+(?:{forms}))+)\Z", r"\2\1", answer) if forms else answer
