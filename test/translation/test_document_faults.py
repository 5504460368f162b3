"""Files that were once written wrongly or ended in an error: odd tables, escapes, indentation and notes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import yaml

from rwkv_batch.translation.documents import xml_files
from rwkv_batch.translation.documents.document import DocumentError
from test.translation.documents import archive, read, round_trip

RAGGED = "id,text,note\n1,Hello\n2,World,x,extra\n3,Bye,z\n4,5,z,extra\n\n6\n"
BILINGUAL = "id,text,note,text (de)\n1,Hello,,üHello\n2,World,x,üWorld,extra\n3,Bye,z,üBye\n4,5,z,,extra\n\n6\n"
MIXED_QUOTES = 'id,"text"\r\n"1", Hello \r\n\r\n2,"a ""b"" c"\r\n3,x;y'
NOTES = """WEBVTT

NOTE a --> b
not this

NOTE
00:01.000 --> 00:02.000
old text

1
00:01.000 --> 00:02.000
Hello there
"""


def test_a_bilingual_table_of_ragged_rows_loses_no_cell() -> None:
    """The translation overwrote the last cell of a row that was shorter or longer than the header."""
    assert round_trip(RAGGED, "a.csv", is_bilingual=True, column="text").decode() == BILINGUAL


def test_tables_keep_the_bytes_of_other_cells() -> None:
    """All cells were written again, with the quotation marks of the first line or none."""
    expected = MIXED_QUOTES.replace("Hello", "üHello").replace('"a ""b"" c"', '"üa ""üb"" üc"').replace("x;y", "üx;üy")
    assert round_trip(MIXED_QUOTES, "a.csv", column="text").decode() == expected


@pytest.mark.slow
@pytest.mark.parametrize("content", ["text\n" + "," * 20_000, "text\n" + "a\n" * 1_000_001])
def test_tables_are_bounded(content: str) -> None:
    with pytest.raises(DocumentError, match="has more than"):
        read(content, "a.csv", column="text")


def test_escapes_of_android_become_characters() -> None:
    """A pair of surrogates stayed two, which no JSON can have: 500."""
    content = r'<resources><string name="a">Hi \uD83D\uDE00 and \uD83D x</string></resources>'
    (unit,) = read(content, "a.xml").units
    assert unit.text == "Hi 😀 and � x"
    assert "üHi 😀 üand � üx" in round_trip(content, "a.xml").decode()


def test_quoted_strings_of_android_stay_quoted() -> None:
    """The marks, which Android does not show, were escaped, and shown."""
    content = """<resources><string name="q">"It's  two \\"x\\""</string></resources>"""
    (unit,) = read(content, "a.xml").units
    assert unit.text == """It's  two "x\""""
    assert """>"üIt\\'üs""" in round_trip(content, "a.xml").decode()
    assert """\\"üx\\""</string>""" in round_trip(content, "a.xml").decode()


def test_plurals_of_objects_in_a_list_are_apart() -> None:
    """They shared a path, so the second object took the first one's forms."""
    content = """[{"n_one": "one file", "n_few": "{{count}} f", "n_other": "{{count}} files"},
{"n_one": "one dog", "n_other": "{{count}} dogs"}, {"n_other": "cats"}]"""
    units = [unit.text for unit in read(content, "a.json", target="ru").units]
    assert not any("file" in text and "dog" in text for text in units) and units[-1] == "cats"
    assert round_trip(content, "a.json", target="ru").count(b'"n_few"') == 2


def xliff(language: str, target: str) -> str:
    unit = f'<trans-unit id="1"><source>Hello</source>{target}</trans-unit>'
    return f'<file original="a" source-language="en" target-language="{language}"><body>{unit}</body></file>'


def test_xliff_of_several_languages_keeps_the_others() -> None:
    """Each file was said to be in the requested language, also with finished translations into another."""
    files = xliff("fr", "<target>Bonjour</target>") + xliff("fr", "") + xliff("de", "")
    content = f'<xliff version="1.2" xmlns="urn:oasis:names:tc:xliff:document:1.2">{files}</xliff>'
    result = round_trip(content, "a.xlf").decode()
    assert result.count('target-language="fr"') == 1 and result.count('target-language="de"') == 2
    assert "Bonjour" in result and result.count("üHello") == 2
    whole = f'<xliff version="1.2">{xliff("fr", "<target>Bonjour</target>")}</xliff>'
    with pytest.raises(DocumentError, match="translations into 'fr'"):
        read(whole, "a.xlf")


def test_a_declaration_of_xml_stays() -> None:
    content = '<?xml version="1.0" encoding="utf-8"?>\n\n<resources><string name="a">Hi</string></resources>\n'
    assert round_trip(content, "a.xml").decode() == content.replace("Hi", "üHi")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a: |2+\n    indented\n  second\n\n\nb: x y\n", {"a": "  üindented\nüsecond\n\n\n", "b": "üx üy"}),
        ("- |1-\n  two spaces\n", [" ütwo üspaces"]),
        ("a: |\n\n  lead\nb: c\n", {"a": "\nülead\n", "b": "üc"}),
        ("a: >\n  one\n  two\n\n  three\n", {"a": "üone ütwo\nüthree\n"}),
        ("a: >\n  one\n    two\n    three\n\n  four\n", {"a": "üone\n  ütwo\n  üthree\n\nüfour\n"}),
        ("hello world\n", "ühello üworld"),
        ("|\n  one two\n", "üone ütwo\n"),
    ],
)
def test_blocks_and_roots_of_yaml(content: str, expected: Any) -> None:
    """Spaces at a block's beginning were doubled, its first blank lines and the breaks of a folded block were lost."""
    assert yaml.safe_load(round_trip(content, "a.yaml")) == expected


def test_notes_of_subtitles_are_not_translated() -> None:
    """An arrow in a note began a cue."""
    assert round_trip(NOTES, "a.vtt").decode() == NOTES.replace("Hello there", "üHello üthere")


def test_xml_of_many_elements_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node takes a hundred bytes for each of its own, so a small docx took gigabytes."""
    monkeypatch.setattr(xml_files.etree, "fromstring", lambda *_: pytest.fail("it was parsed"))
    image = random.Random(1).randbytes(1 << 16)
    for body in ("<a/>" * 1_000_001, "<a b='' c='' d=''/>" * 250_001):
        with pytest.raises(DocumentError, match="split it"):
            read(archive({"word/document.xml": f"<w>{body}</w>", "image.png": image}), "a.docx")
        with pytest.raises(DocumentError, match="tags and attributes in the file; the limit is 1000000"):
            read(f"<resources>{body}</resources>", "a.xml")


def test_the_parts_of_a_file_share_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xml_files, "_MAX_MARKS", 100)
    part = "<w>" + "<a/>" * 60 + "</w>"
    with pytest.raises(DocumentError, match="more than 100 tags and attributes in its parts"):
        read(archive({"word/document.xml": part, "word/header1.xml": part}), "a.docx")


def test_sheets_without_texts_are_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xml_files, "_MAX_MARKS", 100)
    sheet = "<worksheet>" + "<c><v>1</v></c>" * 60 + "</worksheet>"
    parts = {"xl/worksheets/sheet1.xml": sheet, "xl/sharedStrings.xml": "<sst><si><t>Hi</t></si></sst>"}
    assert [unit.text for unit in read(archive(parts), "a.xlsx").units] == ["Hi"]
