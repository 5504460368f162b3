"""Splits a text into segments to translate and text to keep. Joined, they are the text, byte for byte."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import chain, pairwise

from sentencex import get_sentence_boundaries

from rwkv_batch.translation.languages import language_code
from rwkv_batch.translation.markers import (
    BREAK,
    MARK,
    Format,
    Marker,
    MarkerOptions,
    Segment,
    interleave,
    parse,
    partners,
)


class Split(StrEnum):
    """Where segments end. A blank line always ends one."""

    NONE = "none"
    NEWLINES = "newlines"
    SENTENCES = "sentences"
    WRAPPED = "wrapped"
    """At sentences; a single line break is white space."""


_BLANK_LINES = re.compile(rf"\n\s*\n\s*|{BREAK}\s*")
"""The match takes all white space after a newline, so each character is scanned at most three times."""
_LINES = re.compile(rf"[\n\r\v\f\x85\u2028{BREAK}]\s*")
_BREAKS = re.compile(rf"{BREAK}\s*")
_MARKS = re.compile(f"[{MARK}{BREAK}]")
_LETTER = re.compile(r"[^\W\d_]")
_NOT_LETTERS = re.compile(r"[\s\ud800-\udfff]")
_NUMBER = r"(?:[(（]?([a-z]|\d{1,2})[)）]|([①-⑳]))"
_BULLET = re.compile(rf"(?:[-*+•·▪>]|#{{1,6}})\s+|{_NUMBER}\s*")
_ITEM = re.compile(rf"(?:\A|(?<=[;:.；：。])|(?<=[;:.；：。]\s)){_NUMBER}|(?:\A|(?<=\s))[•▪](?=\s)")
"""The beginning of a list's item within a line. References like "(a), (b) and (c)" are none."""
_CLOSING = re.compile(rf"[{MARK})\]”’»」』）]+\s*")
_MAX_CHUNK = 4000
"""Characters that are split into sentences at once. The time grows with the square of the quotation marks."""
MAX_TEXT_CHARACTERS = 1 << 20
"""Of one text: a search in it lets no other thread run. It is more than the token limits allow in most languages."""
Span = tuple[int, int]


def split_text(text: str, options: MarkerOptions, split: Split, language: str) -> Iterator[str | Segment]:
    """Yield the segments of a text. Raises TooManyMarkersError.

    Text to keep is yielded as `str`.
    language: code or name of the text's language
    """
    flat, markers = parse(text, options)
    is_markup = options.format is not Format.TEXT
    at = used = counted_at = counted = 0
    for span in _spans(flat, split, language_code(language), is_markup):
        counted += len(_MARKS.findall(flat, counted_at, span[0]))
        counted_at = span[0]
        start, end, first, last = _without_edges(flat, *span, markers, counted)
        if not _LETTER.search(flat, start, end):
            continue
        if not is_markup and (bullet := _BULLET.match(flat, start, end)) is not None:
            start = bullet.end()
        if start > at:
            yield _raw(flat[at:start], markers[used:first])
        yield Segment(flat[start:end], tuple(markers[first:last]), is_markup, is_markup or split is Split.WRAPPED)
        at, used = end, last
    if at < len(flat):
        yield _raw(flat[at:], markers[used:])


def has_letters(text: str) -> bool:
    return _LETTER.search(text) is not None


def _raw(flat: str, markers: Sequence[Marker]) -> str:
    return interleave(_MARKS.split(flat), [marker.raw for marker in markers])


def _spans(flat: str, split: Split, code: str, is_markup: bool) -> Iterator[Span]:
    """Yield start and end of each segment. A segment has white space and markers at its ends."""
    by_lines = split in (Split.NEWLINES, Split.SENTENCES)
    boundary = _BREAKS if is_markup else _LINES if by_lines else _BLANK_LINES
    at = 0
    gaps = (gap.span() for gap in boundary.finditer(flat))
    for end, start in chain(gaps, [(len(flat), len(flat))]):
        if split in (Split.SENTENCES, Split.WRAPPED):
            yield from _sentences(flat, at, end, code)
        else:
            yield at, end
        at = start


def _sentences(flat: str, at: int, end: int, code: str) -> Iterator[Span]:
    while at < end:
        stop = min(at + _MAX_CHUNK, end)
        lengths = _sentence_lengths(_NOT_LETTERS.sub(" ", flat[at:stop]), code)
        if stop < end and len(lengths) > 1:
            lengths.pop()  # it may continue after the chunk
        for length in lengths:
            starts = [at + start for start in _item_starts(flat[at : at + length])]
            yield from pairwise([at, *starts, at + length])
            at += length


def _item_starts(sentence: str) -> list[int]:
    """Return where items of a list in one line begin, without one at the beginning."""
    starts, following = list[int](), {"a", "1", "①"}
    for found in _ITEM.finditer(sentence):
        mark = found[1] or found[2] or ""
        if mark and mark not in following:
            continue
        if mark:
            following = {str(int(mark) + 1) if mark.isascii() and mark.isdigit() else chr(ord(mark) + 1)}
        starts.append(found.start())
    return [start for start in starts if start] if len(starts) > 1 else []


def _sentence_lengths(text: str, code: str) -> list[int]:
    """Return the lengths of the sentences of one line. Their sum is the line's length."""
    sentences: list[str] = []
    joins = False
    for boundary in get_sentence_boundaries(code, text):
        sentence: str = boundary["text"]
        if sentences and not sentences[-1][-1].isspace():
            if joins:  # a quotation within its sentence
                sentence = sentences.pop() + sentence
            elif (closing := _CLOSING.match(sentence)) is not None:
                sentences[-1] += closing.group()
                sentence = sentence[closing.end() :]
        if sentence:
            sentences.append(sentence)
        joins = boundary["boundary_symbol"] is None
    return [*map(len, sentences)] if sum(map(len, sentences)) == len(text) else [len(text)]


def _without_edges(flat: str, start: int, end: int, markers: list[Marker], first: int) -> tuple[int, int, int, int]:
    """Remove white space and removable tags from the ends of a span.

    first: index of the span's first marker. The last two results are the indices of its markers.
    """
    last = first + flat.count(MARK, start, end)
    other = partners(markers[first:last])
    base = first

    def is_left_out(index: int, opens: bool) -> bool:
        partner = other[index - base]
        encloses = partner == (last - 1 if opens else first) - base and flat[start] == flat[end - 1] == MARK
        return bool(markers[index].tag) and (encloses or partner is None or not first <= partner + base < last)

    while start < end:
        if flat[start].isspace():
            start += 1
        elif flat[end - 1].isspace():
            end -= 1
        elif flat[start] == MARK and is_left_out(first, True):
            start, first = start + 1, first + 1
        elif flat[end - 1] == MARK and is_left_out(last - 1, False):
            end, last = end - 1, last - 1
        else:
            break
    return start, end, first, last
