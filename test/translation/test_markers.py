"""Placeholders and tags: which are found, and that a translation has each of them."""

from __future__ import annotations

import random
import re
import time

import pytest

from rwkv_batch.translation.markers import MARK, Format, MarkerOptions, Segment, parse, pattern_of
from rwkv_batch.translation.segments import Split, split_text

FOUND = [
    "%s", "%d", "%1$s", "%-5.2f", "%(name)s", "%@", "%lu", "{name}", "{0}", "{}", "{{x}}", "{{ user.name }}", "${x}",
    "<0>", "</0>", "<b1>", '<a href="https://x.y/?a=1&b=2" title=\'a > b\'>', "<br/>", "https://example.org/a?b=(c)d",
    "a.b+c@mail.example.org", "`ls -l | wc`", "{n, plural, one {# file} other {{x} files}}",
]  # fmt: skip


@pytest.mark.parametrize("marker", FOUND)
def test_a_marker_is_found_as_it_is(marker: str) -> None:
    flat, markers = parse(f"See {marker}, then go.", MarkerOptions())
    assert flat == f"See {MARK}, then go." and [one.raw for one in markers] == [marker]


@pytest.mark.parametrize("text", ["100% sure", "5 < 6 and 7 > 6", "a {b", "50%discount", "f(x) = {", "he@home", "1 %"])
def test_other_text_has_no_marker(text: str) -> None:
    assert parse(text, MarkerOptions()) == (text, [])


@pytest.mark.parametrize("name", ["字:句", "été", "_note", ":a"])
def test_names_of_xml_begin_with_any_letter(name: str) -> None:
    text = f"<{name} x='1'>one <{name}/>two</{name}>"
    found = [one.raw for one in parse(text, MarkerOptions(Format.XML))[1]]
    assert found == [f"<{name} x='1'>", f"<{name}/>", f"</{name}>"]
    assert parse(text, MarkerOptions(Format.HTML)) == (text, []), "HTML has no such tags"


@pytest.mark.parametrize("form", list(Format))
def test_a_tag_without_an_end_is_read_once(form: Format) -> None:
    began, text = time.thread_time(), f"<{'é' if form is Format.XML else 'a'}" + "a" * 300_000
    assert parse(text, MarkerOptions(form)) == (text, [])
    assert time.thread_time() - began < 1, "each beginning of its name was tried: 5 s"


def test_terms_that_are_not_translated_are_markers() -> None:
    options = MarkerOptions(keep=("Foo", "Foo Bar", "状态池"))
    found = parse("Foo Bar and Foo's Foods 的状态池。", options)[1]
    assert [one.raw for one in found] == ["Foo Bar", "Foo", "状态池"]


def bounded(term: str) -> str:
    left, right = ("" if one in "中 -" else "[abcé1]" for one in (term[0], term[-1]))
    return f"{left and f'(?<!{left})'}{re.escape(term)}{right and f'(?!{right})'}"


@pytest.mark.slow
def test_the_pattern_of_terms_finds_what_an_alternation_finds() -> None:
    dice = random.Random(3)

    def word(longest: int) -> str:
        return "".join(dice.choices("ab c中é1-", k=dice.randint(1, longest)))

    for _ in range(200):
        terms = {word(4) for _ in range(5)}
        text = word(40)
        plain = re.compile("|".join(map(bounded, sorted(terms, key=len, reverse=True))))
        found = re.finditer(pattern_of(terms), text)
        assert [one.span() for one in found] == [one.span() for one in plain.finditer(text)]


def test_terms_with_a_common_beginning_compare_it_once() -> None:
    terms = ["word " * 19 + f"{number:03}" for number in range(256)]
    assert pattern_of(terms).count("word") == 19
    assert re.fullmatch(pattern_of(terms), terms[255])
    nested = ["a" * length for length in range(1, 101)]
    assert re.compile(pattern_of(nested)).search("-" + "a" * 100 + "-")[0] == "a" * 100  # type: ignore[index]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("About 5 km, 3.5 GB and 1,500\u00a0m away", ["5 km", "3.5 GB", "1,500\u00a0m"]),
        ("约5km远，80 km/h，-20 °C", ["5km", "80 km/h", "-20 °C"]),
        (
            "It is \u221220 °C, 1 000 km, 1e-5 m and 5\u201310 kg.",
            ["\u221220 °C", "1 000 km", "1e-5 m", "5\u201310 kg"],
        ),
        ("A-5 km, 3×4 m, 10:30 m, 1/2 km, $5 m, 5'000 km, 1 000" + " 000" * 9999, []),
        ("MP3 ms, iPhone 12 mini, 5 t-shirts, 5 in the 2020 A man, 1.5.m", []),
        ("1," * 300_000 + "9" * 300_000, []),
    ],
)
def test_numbers_with_units_are_markers(text: str, found: list[str]) -> None:
    assert [one.raw for one in parse(text, MarkerOptions())[1]] == found


def test_a_number_keeps_its_unit_in_a_form_of_the_language() -> None:
    """The mask did not know them: a translation could lose them, or have another unit."""
    one = segment("It is 3.5 km to %s and 5 kg.")
    required = one.required()
    assert one.shown() == "It is 3.5 km to %s and 5 kg." and required is not None
    assert [(forms[0], count) for forms, count in required.words] == [("3.5 km", 1), ("5 kg", 1)]
    assert {"3,5 km", "3.5公里", "3,5 км"} < {*required.words[0][0]}
    assert one.restore("到 %s 有3.5公里，5 kg。") == "到 %s 有3.5公里，5 kg。"
    for wrong in ("到 %s 有3.5英里，5 kg", "到 %s 有35公里，5 kg", "到 %s 有5 kg"):
        assert one.restore(wrong) is None
    cold = segment("It is -20 °C to 1 000 km now, 5-10 kg.")
    assert cold.restore("现在零下20°C，1000公里，5到10公斤。") and cold.restore("\u221220 °C, 1 000 km, 5–10 kg")
    assert cold.restore("20 °C, 1000 km, 5-10 kg") is cold.restore("-20 °C, 000 km, 5-10 kg") is None
    (page,) = split_text("Is 5&nbsp;km &amp; 5 km far?", MarkerOptions(Format.HTML), Split.NONE, "en")
    assert isinstance(page, Segment) and page.shown() == "Is 5 km & 5 km far?"
    assert page.restore("Sind 5 km & 5 km weit?") == "Sind 5&nbsp;km &amp; 5 km weit?"
    assert page.restore("Sind 5 km weit?") is None


def segment(text: str) -> Segment:
    (found,) = split_text(text, MarkerOptions(), Split.NONE, "en")
    assert isinstance(found, Segment)
    return found


def test_an_answer_with_each_marker_gets_them_back() -> None:
    one = segment("Click <a href='x'>here <b>now</b></a> to see %s and %1$d of {name}.")
    assert one.shown() == "Click <0>here <1>now</1></0> to see %s and %1$d of {name}."
    good = "{name}：%s 和 %1$d，<0>这里<1>现在</1></0>。"
    assert one.restore(good) == "{name}：%s 和 %1$d，<a href='x'>这里<b>现在</b></a>。"


@pytest.mark.parametrize(
    "answer",
    ["到 %s 和 %d", "<0>到</0> %d 和 %s", "</0>到<0> %s 和 %d", "<0>到</0> %s 和 %d %s", "<0>到</0> %s 和 %d <b>"],
    ids=["lost", "swapped", "not nested", "twice", "added"],
)
def test_an_answer_without_its_markers_is_refused(answer: str) -> None:
    one = segment("Go <b>to</b> %s and %d")
    assert one.restore("<0>到</0> %s 和 %d") == "<b>到</b> %s 和 %d"
    assert one.restore(answer) is None
    assert one.join(["去 ", "到", " ", " 和 ", ""]) == "去 <b>到</b> %s 和 %d"


@pytest.mark.parametrize("markup", ['<!DOCTYPE x [<!ENTITY e SYSTEM "f">]>', "<!DOCTYPE x [<!ELEMENT a>", "&chapter;"])
def test_declarations_and_own_entities_of_xml_stay(markup: str) -> None:
    """The model translated a DOCTYPE's entities, and a reference to one became text."""
    _, markers = parse(f"a &amp; b{markup}", MarkerOptions(Format.XML))
    assert [one.raw for one in markers] == [markup]


@pytest.mark.parametrize("format_", list(Format))
def test_a_long_word_after_a_less_than_sign_takes_linear_time(format_: Format) -> None:
    """Each of 64 lengths of the name was tried to the text's end."""
    started = time.process_time()
    assert parse("<" + "a" * 300_000, MarkerOptions(format_))[1] == []
    assert time.process_time() - started < 1
