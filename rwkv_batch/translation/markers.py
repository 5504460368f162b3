"""Finds what a translation must keep: placeholders, tags, addresses, code, numbers with units and protected terms.

`parse` replaces each of these markers by one character, MARK or BREAK, and returns them in a list. BREAK also ends a
segment. A `Segment` shows its markers to the model and puts them back into the answer.
"""

from __future__ import annotations

import html
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rwkv_batch.translation.elements import (
    BLOCKS,
    TAG,
    VERBATIM,
    XML_TAG,
    element_end,
    is_protected,
    structural_tags,
    tag_name,
)
from rwkv_batch.translation.measures import MEASURE, measure_forms
from sampling.grammar.constraint import UNSPACED, RequiredText

MARK, BREAK = "\ufffc", "\u2029"
MAX_MARKERS = 100_000
"""Per text."""
_MAX_SHOWN = 64
"""A longer marker is shown to the model as a short tag."""
_LEADS = ("<", "{", "$", "%")
"""First characters of markers that the model sees. The sampler allows no other use of them."""
_MAX_ICU = 10_000


class Format(StrEnum):
    """How a text is marked up."""

    TEXT = "text"
    HTML = "html"
    XML = "xml"


class TooManyMarkersError(ValueError):
    """A text has more than MAX_MARKERS markers."""


PLACEHOLDERS = "|".join(
    (
        r"`[^`\n]+`",
        r"(?a:https?://[\w!#$%&()*+,./:;=?@\[\]~-]*[\w#$%&*+/=@~-])",
        r"(?a:(?<![\w.+-])[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,8})",
        r"\$\{[^{}\n]{0,256}\}",
        r"\{\{[^{}\n]{0,256}\}\}",
        r"(?P<icu>\{\s{0,9}\w{1,64}\s{0,9},\s{0,9}(?:plural|selectordinal|select|number|date|time)\b)",
        r"\{[^{}\n]{0,64}\}",
        r"(?a:(?<![\d%])%(?:\(\w{1,64}\)|\d{1,2}\$)?[-+0#]{0,3}\d{0,4}(?:\.\d{1,4})?(?:hh|h|ll|l|L|z|j|t)?[diouxXeEfFgGcsp@])",
        f"[{MARK}{BREAK}]",
        rf"(?P<tag>{TAG})",
    )
)
"""Pattern of what stands for something in a text: placeholders, addresses, code, tags."""
_MARKUP = (
    r"(?P<markup><!--(?s:.*?)(?:-->|\Z)|<!\[CDATA\[(?s:.*?)(?:\]\]>|\Z)"
    r"|<!DOCTYPE[^<>\[]*+\[(?s:.*?)(?:\]\s*+>|\Z)|<[?!][^<>]*+>)"
)
_ENTITY = r"&(?!(?:amp|lt|gt|quot|apos);)[^\W\d][\w.-]{0,63};"
"""A reference that only the document's own DTD explains."""
_LETTER = rf"(?-i:[^\W{UNSPACED}])"
"""A letter or digit of a script that separates words."""
_WORD_BOUNDARY = f"(?!(?<={_LETTER}){_LETTER})"
_UNNUMBERED = re.compile(r"%[^(\d]")
"""The beginning of a printf placeholder whose argument depends on its position."""


@dataclass(frozen=True, slots=True)
class Marker:
    raw: str
    tag: str = ""
    """Name of the tag. "": no tag."""
    is_word: bool = False
    """Whether it is a term that is not translated, or a number with its unit."""
    is_measure: bool = False
    """Whether it is a number with its unit."""

    @property
    def closes(self) -> bool:
        """Whether it is a closing tag."""
        return bool(self.tag) and self.raw.startswith("</")

    @property
    def opens(self) -> bool:
        """Whether it is an opening tag."""
        return bool(self.tag) and not self.closes and not self.raw.endswith("/>")


@dataclass(frozen=True, slots=True)
class MarkerOptions:
    """Options of `parse`: the format, and the terms and tags with a special treatment."""

    format: Format = Format.TEXT
    keep: tuple[str, ...] = ()
    """Terms that are not translated."""
    ignore_tags: frozenset[str] = frozenset()
    """Tags whose content is not translated."""
    splitting_tags: frozenset[str] = frozenset()
    non_splitting_tags: frozenset[str] = frozenset()
    detects_outline: bool = True
    """XML: whether a tag splits the text if there is no text next to it."""

    @property
    def scanner(self) -> re.Pattern[str]:
        """The pattern of all markers. Terms that are kept come first."""
        terms = [f"(?P<kept>{pattern_of(self.keep)})"] if self.keep else []
        markup = {Format.TEXT: [], Format.HTML: [_MARKUP], Format.XML: [_MARKUP, _ENTITY]}[self.format]
        others = PLACEHOLDERS.replace(TAG, XML_TAG) if self.format is Format.XML else PLACEHOLDERS
        return re.compile("|".join((*terms, *markup, others, f"(?P<measure>{MEASURE})")))


def pattern_of(terms: Iterable[str]) -> str:
    """Return the pattern of several terms, longest first: whole words in scripts that separate words.

    It nests as deep as the longest term.
    """
    return _WORD_BOUNDARY + _any_of([*terms]) + _WORD_BOUNDARY


def _any_of(terms: Sequence[str]) -> str:
    """Compares a common beginning once, as in a trie."""
    options = []
    for _, same in itertools.groupby(sorted({term for term in terms if term}), key=lambda term: term[0]):
        group = list(same)
        pairs = zip(group[0], group[-1], strict=False)  # of the first and the last in order, so of all
        start = "".join(one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        options.append(re.escape(start) + _any_of([term[len(start) :] for term in group]))
    if "" in terms:
        options.append("")
    return options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"


def parse(text: str, options: MarkerOptions) -> tuple[str, list[Marker]]:
    """Replace the markers of a text by MARK or BREAK. Raises TooManyMarkersError."""
    out: list[str] = []
    markers: list[Marker] = []
    at = 0
    for start, end, kind, tag, is_break in _find_markers(text, options):
        if len(markers) == MAX_MARKERS:
            raise TooManyMarkersError
        out += (text[at:start], BREAK if is_break else MARK)
        markers.append(Marker(text[start:end], tag, is_word=kind in ("kept", "measure"), is_measure=kind == "measure"))
        at = end
    return "".join((*out, text[at:])), markers


def _find_markers(text: str, options: MarkerOptions) -> Iterator[tuple[int, int, str | None, str, bool]]:
    """Yield each marker's start, end, group, tag name and kind. The last value says whether it ends a segment."""
    scanner = options.scanner
    is_outlined = options.format is Format.XML and options.detects_outline
    structural = structural_tags(text) if is_outlined else frozenset()
    at, closes_icu = 0, True
    while (found := scanner.search(text, at)) is not None:
        start, at = found.span()
        raw, name = found.group(), ""
        is_break = raw == BREAK or found.lastgroup == "markup"
        if found.lastgroup == "icu":
            end = _icu_end(text, start) if closes_icu else 0
            closes_icu, at = end > 0, end or start + 1
            if not end:
                continue
        elif found.lastgroup == "tag":
            name = tag_name(raw)
            if options.format is not Format.TEXT:
                is_break = name in BLOCKS if options.format is Format.HTML else start in structural
                is_break = (is_break or name in options.splitting_tags) and name not in options.non_splitting_tags
                if _is_verbatim(raw, name, options):
                    at, name = element_end(text, at, raw), ""
        yield start, at, found.lastgroup, name, is_break


def _is_verbatim(tag: str, name: str, options: MarkerOptions) -> bool:
    """Return whether the tag begins an element whose content is not translated."""
    is_html = options.format is Format.HTML
    return not tag.startswith("</") and (
        name in options.ignore_tags or (is_html and (name in VERBATIM or is_protected(tag)))
    )


def _icu_end(text: str, start: int) -> int:
    """Return the end of an ICU message. 0: its braces do not close."""
    depth = 0
    for brace in re.compile(r"[{}]").finditer(text, start, start + _MAX_ICU):
        depth += 1 if brace.group() == "{" else -1
        if not depth:
            return brace.end()
    return 0


def partners(markers: Sequence[Marker]) -> list[int | None]:
    """Return the index of each tag's closing or opening tag. None for a tag without one."""
    found: list[int | None] = [None] * len(markers)
    opened: list[int] = []
    for index, marker in enumerate(markers):
        if marker.opens:
            opened.append(index)
        elif marker.closes and opened and markers[opened[-1]].tag == marker.tag:
            other = opened.pop()
            found[index], found[other] = other, index
    return found


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a text that is translated as a whole."""

    text: str
    """Has MARK for each marker."""
    markers: tuple[Marker, ...] = ()
    is_markup: bool = False
    """Whether the text has entities."""
    is_wrapped: bool = False
    """Whether its line breaks and runs of spaces are single spaces."""

    @property
    def parts(self) -> list[str]:
        """The texts around the markers, as the model reads them."""
        return [self._plain(part) for part in self.text.split(MARK)]

    def shown(self) -> str:
        """Return the text for the model: tags are `<1>` and `</1>`, placeholders and kept terms themselves."""
        return interleave(self.parts, self.names)

    @property
    def names(self) -> list[str]:
        """The markers as the model sees them."""
        names: list[str] = []
        for index, (marker, other) in enumerate(zip(self.markers, partners(self.markers), strict=True)):
            if self._is_shown(marker):
                names.append(self._plain(marker.raw) if marker.is_word else marker.raw)
            elif other is None:
                names.append(f"<{index}/>")
            else:
                names.append(f"<{index}>" if other > index else f"</{other}>")
        return names

    def _is_shown(self, marker: Marker) -> bool:
        """Return whether the model sees the marker itself. Other text must not look like it."""
        raw = marker.raw
        if marker.tag or len(raw) > _MAX_SHOWN or "\n" in raw:
            return False
        if marker.is_word:
            return not any(lead in raw for lead in _LEADS)
        return raw[0] in _LEADS[1:] and not any(raw[0] in part for part in self.parts)

    def required(self) -> RequiredText | None:
        """Return what the sampler keeps in an answer. None: nothing, or the text has `<`, which begins markers."""
        indices = [index for index, marker in enumerate(self.markers) if not self._is_kept(marker)]
        place_of = {index: place for place, index in enumerate(indices)}
        if not self.markers or (indices and any("<" in part for part in self.parts)):
            return None
        names, others = self.names, partners(self.markers)
        words = Counter(self._kept_forms(names))
        unused = [lead for lead in _LEADS[:2] if not any(lead in part for part in self.parts)]
        return RequiredText(
            markers=tuple(names[index] for index in indices),
            partners=tuple(-1 if (other := others[index]) is None else place_of[other] for index in indices),
            ordered=tuple(place_of[index] for index in indices if _UNNUMBERED.match(self.markers[index].raw)),
            leads="".join(sorted({*unused, *(names[index][0] for index in indices)})) if indices else "",
            words=tuple(words.items()),
        )

    def _is_kept(self, marker: Marker) -> bool:
        return marker.is_word and self._is_shown(marker)

    def _kept_forms(self, names: Sequence[str]) -> list[tuple[str, ...]]:
        """Return the forms of each kept word."""
        pairs = zip(names, self.markers, strict=True)
        return [measure_forms(name) if one.is_measure else (name,) for name, one in pairs if self._is_kept(one)]

    def restore(self, answer: str) -> str | None:
        """Put the markers back into the answer. None: one is lost, added or misplaced.

        A number with a unit stays in the form that the answer has.
        """
        names = self.names
        if not names:
            return self.escape(answer)
        kept = self._kept_forms(names)
        words = {form: min(forms) for forms in kept for form in forms}
        others = sorted(name for name, marker in zip(names, self.markers, strict=True) if not self._is_kept(marker))
        known = "|".join(
            [*map(re.escape, sorted({*others}, key=len, reverse=True)), *([pattern_of(words)] if words else [])]
        )
        found = [one.group() for one in re.finditer(f"{known}|{PLACEHOLDERS}", answer)]
        markers = [one for one in found if one not in words]
        lost = Counter(map(min, kept)) - Counter(words[one] for one in found if one in words)
        if sorted(markers) != others or lost or not _is_nested(markers):
            return None
        raws: dict[str, list[str]] = {}
        for name, marker in zip(reversed(names), reversed(self.markers), strict=True):
            raws.setdefault(name, []).append(marker.raw)
        restored = [self._raw_of(name, raws) for name in found]
        if list(filter(_UNNUMBERED.match, restored)) != [m.raw for m in self.markers if _UNNUMBERED.match(m.raw)]:
            return None
        return interleave([self.escape(text) for text in re.split(known, answer)], restored)

    def _raw_of(self, name: str, raws: Mapping[str, list[str]]) -> str:
        """Return what a marker of the answer stands for. A word may come more often than in the text."""
        left = raws.get(name)
        return self.escape(name) if left is None else left.pop() if len(left) > 1 else left[0]

    def join(self, translations: Sequence[str]) -> str:
        """Return the translations of `parts` with the markers between them."""
        return interleave([self.escape(one) for one in translations], [marker.raw for marker in self.markers])

    def escape(self, text: str) -> str:
        return html.escape(text, quote=False) if self.is_markup else text

    def _plain(self, text: str) -> str:
        text = html.unescape(text) if self.is_markup else text
        return re.sub(r"\s+", " ", text) if self.is_wrapped else text


def no_markers(text: str) -> RequiredText:
    """Return the constraint that the translation of a text without markers has none."""
    return RequiredText(leads="".join(lead for lead in _LEADS if lead not in text))


def interleave(texts: Sequence[str], between: Sequence[str]) -> str:
    """Join n + 1 texts with n texts between them."""
    return texts[0] + "".join(one + text for one, text in zip(between, texts[1:], strict=True))


def _is_nested(names: Sequence[str]) -> bool:
    """Return whether the numbered tags nest."""
    opened: list[str] = []
    for name in names:
        if re.fullmatch(r"<\d+>", name):
            opened.append(name)
        elif re.fullmatch(r"</\d+>", name) and (not opened or opened.pop() != name.replace("/", "")):
            return False
    return not opened
