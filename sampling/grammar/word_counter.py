"""Counts the words that a text must have."""

from __future__ import annotations

import codecs
import re

from sampling.grammar.constraint import UNSPACED, RequiredText

_LETTERS = re.compile(rf"[^\W{UNSPACED}]{{2}}")


class WordCounter:
    """Counts the words that a text still needs, as its characters come."""

    def __init__(self, text: RequiredText) -> None:
        forms = {form for word_forms, _ in text.words for form in word_forms}
        self._find = re.compile("|".join(map(re.escape, sorted(forms, key=len, reverse=True))), re.IGNORECASE)
        self._first_forms = [forms[0] for forms, _ in text.words]
        self._words: dict[str, set[int]] = {}
        for number, (word_forms, _) in enumerate(text.words):
            for form in word_forms:
                self._words.setdefault(form.casefold(), set()).add(number)
        self._longest = max(map(len, forms))
        self._find_last = re.compile(f"[{''.join(re.escape(form[-1]) for form in forms)}]", re.IGNORECASE).search
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text, self._at = "", 0
        self._needed = [count for _, count in text.words]
        """How often each word is needed after `_at`."""
        self._has_rejected = False
        """Whether the last search met a match inside a word. It may hide a later one."""
        self.missing = [*self._needed]
        """How often each word is missing. More text may change it: "cat" becomes "catalogue"."""

    @property
    def is_final(self) -> bool:
        """Return whether no word is missing, with any further text."""
        return max(self._needed) <= 0

    @property
    def has_all(self) -> bool:
        return max(self.missing) <= 0

    def add(self, data: bytes) -> bool:
        """Read the next bytes. Returns whether `missing` may have changed."""
        text = self._decoder.decode(data)
        self._text += text
        if self.missing == self._needed and not self._has_rejected and self._find_last(text) is None:
            return False  # no word ends here, and none at the end of the text before
        self.missing, self._has_rejected = [*self._needed], False
        for found in self._find.finditer(self._text, self._at):
            if _is_inside_word(self._text, found.start()) or _is_inside_word(self._text, found.end()):
                self._has_rejected = True
                continue
            is_final = found.start() + self._longest < len(self._text)
            if is_final:
                self._at = found.end()
            for number in self._words.get(found.group().casefold(), ()):
                self.missing[number] -= 1
                self._needed[number] -= is_final
        self._at = max(self._at, len(self._text) - self._longest)
        if self._at > 2 * self._longest + 256:
            self._text, self._at = self._text[self._at - 1 :], 1  # with the character before a word
        return True

    def closing(self) -> list[bytes]:
        """Return the missing words, each after a space."""
        pairs = zip(self._first_forms, self.missing, strict=True)
        return [f" {form}".encode() for form, count in pairs for _ in range(count)]


def _is_inside_word(text: str, at: int) -> bool:
    """Return whether a word continues on both sides. Both are letters of a script that separates words."""
    return 0 < at < len(text) and _LETTERS.match(text, at - 1) is not None
