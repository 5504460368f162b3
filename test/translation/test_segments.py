"""Splitting a text into segments: where they end, and that nothing else changes."""

from __future__ import annotations

import random

import pytest

from rwkv_batch.translation.markers import MARK, Format, MarkerOptions, Segment, TooManyMarkersError, interleave
from rwkv_batch.translation.segments import Split, split_text
from test.resource_limits import run_bounded

HTML = (
    '<!DOCTYPE html><p class="x">Hello <b>world</b>, see <a href="u">here.</a> Then &amp; go.</p><!-- note -->'
    '<script>let a = "<p>text</p>";</script><div><b>Bold.</b></div><p>A <span translate="no">Name</span> and '
    '<i class="a notranslate">X <i>y</i></i> end.<br/>Line</p>'
)
XML = "<doc><title>A title</title><p>Some <i>inline</i> text.</p><raw>kept <b>x</b></raw></doc>"


def pieces(
    text: str, split: Split = Split.NEWLINES, options: MarkerOptions | None = None, language: str = "en"
) -> list[str | Segment]:
    return list(split_text(text, options or MarkerOptions(), split, language))


def shown(
    text: str, split: Split = Split.NEWLINES, options: MarkerOptions | None = None, language: str = "en"
) -> list[str]:
    return [piece.shown() for piece in pieces(text, split, options, language) if isinstance(piece, Segment)]


def raw(piece: str | Segment) -> str:
    """Return the source of a piece."""
    if isinstance(piece, str):
        return piece
    return interleave(piece.text.split(MARK), [marker.raw for marker in piece.markers])


SENTENCES = {
    "en": ["Dr. Smith paid $3.50 to J. R. Tolkien.", 'He said "Go." at 5 p.m. in fig. 3.', "Yes... No!", "Really?!"],
    "de": ["Das ist z. B. gut.", "Am 3. Oktober kam Nr. 5.", "Ja!"],
    "zh-CN": ["他说：“你好！”然后走了。", "今天天气很好？", "再见。"],
    "ja": ["今日は。", "「元気？」と聞いた。", "はい！"],
    "hi": ["यह एक है।", "दूसरा है।"],
}


@pytest.mark.parametrize("language", SENTENCES)
def test_sentences_end_where_their_language_ends_them(language: str) -> None:
    gap = "" if language in ("zh-CN", "ja") else "  "
    expected = [one for one in SENTENCES[language] if one != "Yes... No!"]
    assert shown(gap.join(expected), Split.SENTENCES, language=language) == expected


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("Bring: (a) milk; (b) two loaves of bread; (c) eggs.", ["Bring:", "milk;", "two loaves of bread;", "eggs."]),
        ("1) The cat sleeps; 2) the dog drinks", ["The cat sleeps;", "the dog drinks"]),
        ("• one cat • two dogs", ["one cat", "two dogs"]),
        ("包括：①猫；②狗。", ["包括：", "猫；", "狗。"]),
        ("（1）猫；（2）狗。", ["猫；", "狗。"]),
        ("See options (a), (b) and (c) of part 1) here.", ["See options (a), (b) and (c) of part 1) here."]),
        ("Am 1. Mai und 2. Juni.", ["Am 1. Mai und 2. Juni."]),
        ("Note: (b) is first.", ["Note: (b) is first."]),
    ],
)
def test_items_of_a_list_in_one_line_are_apart(text: str, items: list[str]) -> None:
    """They were one sentence, of which a model translated the first item."""
    language = "zh-CN" if text[-1] == "。" else "de" if text.startswith("Am") else "en"
    found = pieces(text, Split.SENTENCES, language=language)
    assert [one.shown() for one in found if isinstance(one, Segment)] == items and "".join(map(raw, found)) == text


def test_a_sentence_longer_than_a_chunk_is_not_cut_at_its_border() -> None:
    sentences = [f"Number {index} is {'very ' * (index % 40)}long." for index in range(400)]
    assert shown(" ".join(sentences), Split.SENTENCES) == sentences


def test_each_line_stays_a_line() -> None:
    lines = [f"{' ' * (index % 3)}- Line {index}. Two?\t" if index % 7 else "" for index in range(3000)]
    for end in ("\n", "\r\n"):
        found = shown(end.join(lines))
        assert found == [f"Line {index}. Two?" for index in range(3000) if index % 7]
    assert shown("A wrapped\nline. Next\none.\n\nLast", Split.WRAPPED) == ["A wrapped line.", "Next one.", "Last"]
    assert shown("One\ntwo\n \nthree", Split.NONE) == ["One\ntwo", "three"]


def test_markup_splits_at_blocks_and_keeps_what_is_not_text() -> None:
    html = MarkerOptions(Format.HTML)
    assert shown(HTML, Split.SENTENCES, html) == [
        "Hello <0>world</0>, see <2>here.</2>", "Then & go.", "Bold.",
        "A <0/> and <1/> end.", "Line",
    ]  # fmt: skip
    xml = MarkerOptions(Format.XML, ignore_tags=frozenset({"raw"}))
    assert shown(XML, Split.NONE, xml) == ["A title", "Some <0>inline</0> text."]
    flat = MarkerOptions(Format.XML, detects_outline=False, splitting_tags=frozenset({"p"}))
    assert shown("<d>One <p>two</p> three</d>", Split.NONE, flat) == ["One", "two", "three"]


def test_the_pieces_are_the_text() -> None:
    dice = random.Random(3)
    parts = "<b> </b> <br/> <p> </p> {x} %s \n \r\n . A b 。 ” “ &amp; ` { } < \ufffc \u2029 \u3000 *".split(" ")
    for _ in range(1000):
        text = "".join(dice.choice([*parts, " "]) for _ in range(dice.randrange(20)))
        for form in Format:
            for split in Split:
                found = pieces(text, split, MarkerOptions(form))
                assert "".join(map(raw, found)) == text, (text, form, split)


UNITS = (
    "<!--",
    "<![CDATA[",
    "<?",
    "{a,plural,{",
    "`a\n",
    "“",
    '<a "',
    "<code ",
    "a.",
    "https://)",
    "<p class = ",
    "<b>a",
)


def split_all() -> int:
    """Split long texts that are the worst case of patterns."""
    for unit in UNITS:
        for form in Format:
            for _ in split_text(unit * (30_000 // len(unit)), MarkerOptions(form), Split.SENTENCES, "en"):
                pass
    return len(UNITS)


@pytest.mark.slow
def test_time_is_linear_in_the_markup() -> None:
    assert run_bounded(split_all).result == len(UNITS)


def test_markers_are_bounded() -> None:
    with pytest.raises(TooManyMarkersError):
        pieces("{a} " * 100_001)
