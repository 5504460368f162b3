# ruff: noqa: E501 - files as they are
"""Files of each format: texts are translated, everything else stays, and the format's own library opens the result."""

from __future__ import annotations

import contextlib
import csv
import gettext
import io
import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import docx as python_docx
import polib
import pysubs2
import pytest
import yaml
from lxml import etree

from rwkv_batch.translation.documents.document import DocumentError, decode, requests
from rwkv_batch.translation.documents.formats import translated_name
from rwkv_batch.translation.documents.plurals import plural_forms
from test.conftest import rest_slow
from test.translation.documents import archive, docx, epub, read, round_trip

MARKDOWN = """---
title: A first page
date: 2020-01-01
---
# Hello *big* world

A paragraph with **bold text** and [a link](docs/a.md "t") and `code` that
goes over two lines.  
After a hard break.

1. one item
   - nested item *here*

```python
print("hi")
```

| Name | Meaning |
|------|---------|
| a    | the `x` letter |

![an image](img.png)

<div><p>HTML text</p></div>

[ref]: http://example.com "Title"
"""  # noqa: W291 - a hard break
TRANSLATED_MARKDOWN = """---
title: üA üfirst üpage
date: 2020-01-01
---
# üHello *übig* üworld

üA üparagraph üwith **übold ütext** üand [üa ülink](docs/a.md "t") üand `code` üthat ügoes üover ütwo ülines.  
üAfter üa ühard übreak.

1. üone üitem
   - ünested üitem *ühere*

```python
print("hi")
```

| üName | üMeaning |
|------|---------|
| üa    | üthe `x` ületter |

![üan üimage](img.png)

<div><p>üHTML ütext</p></div>

[ref]: http://example.com "Title"
"""  # noqa: W291
HTML = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>My page</title>
<meta name="description" content="About &amp; more"></head><body><h1 id=a>Hello <b>bold</b> world</h1><p>Two lines
here &amp; there.</p><script>var a="<p>x</p>";</script><p>See <img alt="A &quot;picture&quot;" src=a.png> here</p>
<p translate="no">Keep me</p><pre>code</pre></body></html>
"""
TRANSLATED_HTML = """<!doctype html><html lang="de"><head><meta charset="utf-8"><title>üMy üpage</title>
<meta name="description" content="üAbout &amp; ümore"></head><body><h1 id=a>üHello <b>übold</b> üworld</h1><p>üTwo ülines ühere &amp; üthere.</p><script>var a="<p>x</p>";</script><p>üSee <img alt="üA &quot;üpicture&quot;" src=a.png> ühere</p>
<p translate="no">Keep me</p><pre>code</pre></body></html>
"""


@pytest.mark.parametrize(
    ("name", "source", "result"),
    [
        ("a.md", MARKDOWN, TRANSLATED_MARKDOWN),
        ("a.html", HTML, TRANSLATED_HTML),
        ("a.txt", "One line\r\n\r\n  Two 3 \r\n4\r\n", "üOne üline\r\n\r\n  üTwo 3 \r\n4\r\n"),
        (
            "a.properties",
            "# c\nkey.one = Hello {0} \\u00e9t\\u00e9 \\\n    more\nb: x y\n!no\nempty=\n",
            "# c\nkey.one = \\u00FCHello {0} \\u00FC\\u00E9t\\u00E9 \\u00FCmore\nb: \\u00FCx \\u00FCy\n!no\nempty=\n",
        ),
        (
            "a.strings",
            '/* A note */\n"key" = "Hello \\"you\\" %@";\n// no\nb = "Two\\nlines";\n',
            '/* A note */\n"key" = "üHello \\"üyou\\" %@";\n// no\nb = "üTwo\\nülines";\n',
        ),
        (
            "a.json",
            '{\n  "a": {"b": "Hello {{name}}", "n": 3, "l": ["one", "two \\u00e9"]},\n\t"c" : "https://x.y"}',
            '{\n  "a": {"b": "üHello {{name}}", "n": 3, "l": ["üone", "ütwo üé"]},\n\t"c" : "https://x.y"}',
        ),
        (
            "a.arb",
            '{"@@locale":"en","hi":"Hello","@hi":{"description":"greets"}}',
            '{"@@locale":"de","hi":"üHello","@hi":{"description":"greets"}}',
        ),
        (
            "a.yml",
            "en:\n  a: Hello world # c\n  b: \"Quoted %{name}\"\n  c: 'it''s'\n  d: |\n    two lines\n    here\n\n"
            "  f: true\n  g: 12\n  h: &x anchor\n  i: *x\n  j: [one, two]\n",
            "de:\n  a: üHello üworld # c\n  b: \"üQuoted %{name}\"\n  c: 'üit''üs'\n  d: |\n    ütwo ülines\n    ühere\n"
            "\n  f: true\n  g: 12\n  h: &x üanchor\n  i: *x\n  j: [üone, ütwo]\n",
        ),
        (
            "a.srt",
            "1\n00:00:01,000 --> 00:00:02,000\nHello <i>there</i>\nsecond line of a long text here\n\n"
            "2\n00:00:03,000 --> 00:00:04,000\n- Who?\n- Me\n",
            "1\n00:00:01,000 --> 00:00:02,000\nüHello <i>üthere</i> üsecond\nüline üof üa ülong ütext ühere\n\n"
            "2\n00:00:03,000 --> 00:00:04,000\n- üWho?\n- üMe\n",
        ),
        (
            "a.vtt",
            "WEBVTT - film\n\nNOTE a comment\n\nSTYLE\n::cue {}\n\nid1\n00:01.000 --> 00:02.000 align:start\n<v Ann>Hi\n",
            "WEBVTT - film\n\nNOTE a comment\n\nSTYLE\n::cue {}\n\nid1\n00:01.000 --> 00:02.000 align:start\n<v Ann>üHi\n",
        ),
        (
            "a.ass",
            "[Script Info]\nTitle: x\n\n[Events]\nFormat: Layer, Start, End, Style, Text\n"
            "Dialogue: 0,0:00:01.00,0:00:02.00,Default,{\\an8}Hello, you\\Ntwo\n",
            "[Script Info]\nTitle: x\n\n[Events]\nFormat: Layer, Start, End, Style, Text\n"
            "Dialogue: 0,0:00:01.00,0:00:02.00,Default,{\\an8}üHello, üyou\\Nütwo\n",
        ),
        (
            "a.csv",
            'id;text\r\n1;"Hello; you"\r\n2;"two\r\nlines"\r\n',
            'id;text\r\n1;"üHello; üyou"\r\n2;"ütwo\r\nülines"\r\n',
        ),
    ],
)  # fmt: skip
def test_only_the_texts_of_a_file_change(name: str, source: str, result: str) -> None:
    assert round_trip(source, name).decode() == result


XLIFF_1 = """<xliff version="1.2" xmlns="urn:oasis:names:tc:xliff:document:1.2"><file original="a" source-language="en"
 datatype="plaintext"><body><trans-unit id="1"><source>Click <g id="1">the button</g><x id="2"/> now</source>
 <note>n</note></trans-unit><trans-unit id="2" translate="no"><source>Keep</source></trans-unit><trans-unit id="3">
 <source>Done</source><target state="final">Fertig</target></trans-unit></body></file></xliff>"""
XLIFF_2 = """<xliff xmlns="urn:oasis:names:tc:xliff:document:2.0" version="2.0" srcLang="en"><file id="f"><unit id="u">
<segment id="s"><source>Hello <pc id="1">bold</pc> <ph id="2"/></source></segment><ignorable><source> </source>
</ignorable></unit></file></xliff>"""
TMX = """<!DOCTYPE tmx SYSTEM "tmx14.dtd">
<tmx version="1.4"><header srclang="en-US"/><body><tu><tuv xml:lang="en-US"><seg>A <bpt i="1">&lt;b></bpt>big<ept i="1"
>&lt;/b></ept></seg></tuv></tu><tu><tuv xml:lang="en-US"><seg>Had</seg></tuv><tuv xml:lang="de-DE"><seg>Da</seg></tuv>
</tu></body></tmx>"""


TBX_2 = """<martif type="TBX" xml:lang="en"><martifHeader/><text><body><termEntry id="c1"><descrip type="subjectField">pets
</descrip><langSet xml:lang="fr"><tig><term>chat</term></tig></langSet><langSet xml:lang="en-GB"><ntig><termGrp><term>house
cat</term><termNote type="partOfSpeech">noun</termNote></termGrp></ntig><ntig><termGrp><term>cat</term></termGrp></ntig>
</langSet></termEntry><termEntry id="c2"><langSet xml:lang="en"><tig><term>dog</term></tig></langSet>
<langSet xml:lang="de-AT"><tig><term>Hund</term></tig></langSet></termEntry></body></text></martif>"""
TBX_3 = """<tbx type="TBX-Core" xml:lang="en" xmlns="urn:iso:std:iso:30042:ed-2"><text><body><conceptEntry id="1">
<langSec xml:lang="en"><termSec><term>cat</term></termSec></langSec></conceptEntry></body></text></tbx>"""


@pytest.mark.parametrize(
    ("name", "source", "added"),
    [
        (
            "a.tbx", TBX_2,
            [('<langSet xml:lang="de"><ntig><termGrp><term>ühouse ücat</term></termGrp></ntig></langSet>', "")],
        ),
        ("a.tbx", TBX_3, [('<langSec xml:lang="de"><termSec><term>ücat</term></termSec></langSec>', "")]),
        (
            "a.xlf", XLIFF_1,
            [('<target state="needs-review-translation">üClick <g id="1">üthe übutton</g><x id="2"/> ünow</target>\n ', ""),
             (' target-language="de"', "")],
        ),
        (
            "a.xliff", XLIFF_2,
            [("<target>üHello <pc id=\"1\">übold</pc> <ph id=\"2\"/></target>", ""), (' trgLang="de"', ""),
             (' state="translated"', "")],
        ),
        (
            "a.tmx", TMX,
            [('<tuv xml:lang="de"><seg>üA <bpt i="1">&lt;b&gt;</bpt>übig<ept i="1">&lt;/b&gt;</ept></seg></tuv>', "")],
        ),
    ],
)  # fmt: skip
def test_translators_xml_gets_translations_and_keeps_the_rest(
    name: str, source: str, added: list[tuple[str, str]]
) -> None:
    result = round_trip(source, name).decode()
    for text, _ in added:
        assert result.count(text) == 1, result
        result = result.replace(text, "")
    assert etree.canonicalize(result) == etree.canonicalize(source)


PO = """# Comment
msgid ""
msgstr ""
"Content-Type: text/plain; charset=UTF-8\\n"

#. translators: a note
#: a.c:1
#, c-format
msgctxt "menu"
msgid "Hello %s\\n"
msgstr ""

#, fuzzy
#| msgid "Old"
msgid "New"
msgstr "Alt"

msgid "Done"
msgstr "Fertig"

msgid "%d file"
msgid_plural "%d files"
msgstr[0] ""
msgstr[1] ""

#~ msgid "Gone"
#~ msgstr "Weg"
"""


def test_po_has_the_plural_forms_of_its_language() -> None:
    catalogue = polib.pofile(round_trip(PO, "a.pot", "pl").decode())
    assert catalogue.metadata["Plural-Forms"].startswith("nplurals=3;") and catalogue.metadata["Language"] == "pl"
    hello, new, done, files = [entry for entry in catalogue if not entry.obsolete]
    assert hello.msgstr == "üHello %s\n" and hello.msgctxt == "menu" and hello.occurrences == [("a.c", "1")]
    assert new.msgstr == "üNew" and new.flags == ["fuzzy"] and not new.previous_msgid
    assert not files.flags and not hello.fuzzy
    assert done.msgstr == "Fertig"
    assert files.msgstr_plural == {0: "%d üfile", 1: "%d üfiles", 2: "%d üfiles"}
    assert [entry.msgid for entry in catalogue.obsolete_entries()] == ["Gone"]


def test_a_plural_form_is_translated_with_a_number_that_takes_it() -> None:
    texts = [unit.text for unit in read(PO, "a.po", "ru").units]
    assert texts[2:] == ["%d file", "2 files", "5 files", "%d files"]
    result = read(PO, "a.po", "ru").write(["H", "N", "%d файл", "2 файла", "пять файлов", "%d файлы"]).decode()
    assert polib.pofile(result)[3].msgstr_plural == {0: "%d файл", 1: "%d файла", 2: "%d файлы"}  # five was lost


@pytest.mark.parametrize("language", ["zh", "de", "fr", "ru", "pl", "cs", "ro", "lt", "lv", "sl", "ga", "ar"])
def test_a_formula_gives_a_forms_number_its_index(language: str, tmp_path: Path) -> None:
    header, forms = plural_forms(language)
    entries = "".join(f'msgstr[{index}] "{category}"\n' for index, (category, _) in enumerate(forms))
    catalogue = polib.pofile(f'msgid ""\nmsgstr "Plural-Forms: {header}\\n"\n\nmsgid "a"\nmsgid_plural "b"\n{entries}')
    catalogue.save_as_mofile(str(tmp_path / "a.mo"))
    with (tmp_path / "a.mo").open("rb") as file:
        translations = gettext.GNUTranslations(file)
    assert [translations.ngettext("a", "b", number) for _, number in forms] == [category for category, _ in forms]


ANDROID = r"""<resources xmlns:xliff="urn:oasis:names:tc:xliff:document:1.2">
    <!-- Greeting -->
    <string name="a">Don\'t <b>stop</b> <xliff:g id="n">%1$s</xliff:g>\nnow</string>
    <string name="k" translatable="false">Keep</string>
    <string name="r">@string/a</string>
    <string-array name="l"><item>One</item></string-array>
    <plurals name="p">
        <item quantity="one">%d file</item>
        <item quantity="other">%d files</item>
    </plurals>
</resources>"""


def test_android_keeps_references_escapes_and_gets_plurals() -> None:
    root = etree.fromstring(round_trip(ANDROID, "strings.xml", "ru"))
    a, keep, reference = root.findall("string")
    assert etree.tostring(a, encoding="unicode").endswith(
        r'>üDon\'üt <b>üstop</b> <xliff:g id="n">%1$s</xliff:g>\nünow</string>' + "\n    "
    )
    assert (keep.text, reference.text, root.find("string-array")[0].text) == ("Keep", "@string/a", "üOne")
    items = [(item.get("quantity"), item.text) for item in root.find("plurals")]
    assert items == [("one", "%d üfile"), *((name, "%d üfiles") for name in ("few", "many", "other"))]


def test_json_gets_keys_for_plurals_and_icu_messages_the_languages_forms() -> None:
    source = (
        '{"item_one": "{{count}} item",\n  "item_other": "{{count}} items",\n'
        '"icu": "You have {n, plural, =0 {no files} one {# file} other {# files}} {x}"}'
    )
    result = json.loads(round_trip(source, "a.json", "ru"))
    assert list(result) == ["item_one", "item_other", "item_few", "item_many", "icu"]
    assert result["item_few"] == "{{count}} üitems"
    assert result["icu"] == (
        "{n, plural, =0 {üYou ühave üno üfiles {x}} one {üYou ühave # üfile {x}} few {üYou ühave # üfiles {x}} "
        "many {üYou ühave # üfiles {x}} other {üYou ühave # üfiles {x}}}"
    )


def test_a_string_catalogue_gets_the_language() -> None:
    strings = {
        "Hi %@": {"comment": "c"},
        "Had": {"localizations": {"pl": {"stringUnit": {"state": "translated", "value": "Mam"}}}},
        "n": {
            "localizations": {
                "en": {
                    "variations": {
                        "plural": {
                            "one": {"stringUnit": {"state": "new", "value": "%d day"}},
                            "other": {"stringUnit": {"state": "new", "value": "%d days"}},
                        }
                    }
                }
            }
        },
    }
    source = json.dumps({"sourceLanguage": "en", "strings": strings, "version": "1.0"})
    result = json.loads(round_trip(source, "a.xcstrings", "pl"))["strings"]
    assert result["Hi %@"]["localizations"]["pl"] == {"stringUnit": {"state": "needs_review", "value": "üHi %@"}}
    assert result["Had"] == strings["Had"]
    forms = result["n"]["localizations"]["pl"]["variations"]["plural"]
    assert {name: form["stringUnit"]["value"] for name, form in forms.items()} == {
        "one": "%d üday", "few": "%d üdays", "many": "%d üdays", "other": "%d üdays",
    }  # fmt: skip
    assert result["n"]["localizations"]["en"] == strings["n"]["localizations"]["en"]  # type: ignore[index]


TITLE = '<p xmlns:d="http://purl.org/dc/elements/1.1/"><d:title>A report</d:title><d:creator>Ann</d:creator></p>'
RUNS = (
    '<w:p><w:pPr><w:jc w:val="left"/></w:pPr><w:r w:rsidR="1"><w:t>Hel</w:t></w:r><w:r w:rsidR="2"><w:rPr>'
    '<w:lang w:val="en"/></w:rPr><w:t xml:space="preserve">lo </w:t></w:r><w:proofErr w:type="x"/><w:r><w:rPr><w:b/>'
    '</w:rPr><w:t>bold</w:t></w:r><w:r><w:t xml:space="preserve"> world </w:t><w:tab/><w:t>tab</w:t></w:r>'
    '<w:hyperlink r:id="rId5"><w:r><w:t>link</w:t></w:r></w:hyperlink><w:r><w:fldChar w:fldCharType="begin"/></w:r>'
    '<w:r><w:instrText>PAGE</w:instrText></w:r><w:r><w:fldChar w:fldCharType="end"/></w:r></w:p>'
)


def test_word_files_keep_runs_links_and_fields() -> None:
    cell = "<w:tbl><w:tblGrid><w:gridCol/></w:tblGrid><w:tr><w:tc><w:p><w:r><w:t>In a cell</w:t></w:r></w:p></w:tc></w:tr></w:tbl>"
    box = (
        "<w:p><w:r><w:t>Before </w:t></w:r><w:r><w:drawing><w:txbxContent><w:p><w:r><w:t>In a box</w:t></w:r></w:p>"
        "</w:txbxContent></w:drawing></w:r></w:p>"
    )
    deleted = "<w:p><w:del><w:r><w:delText>old</w:delText></w:r></w:del><w:ins><w:r><w:t>new</w:t></w:r></w:ins></w:p>"
    result = round_trip(docx(RUNS + cell + box + deleted, **{"docProps/x.bin": b"\0\1"}), "a.docx")
    file = python_docx.Document(io.BytesIO(result))
    first = file.paragraphs[0]
    assert first.text == "üHello übold üworld \tütabülink" and first.alignment == 0
    assert [run.text for run in first.runs if run.bold] == ["übold"]
    assert [link.runs[0].text for link in first.hyperlinks] == ["ülink"]
    assert file.tables[0].cell(0, 0).text == "üIn üa ücell"
    content = zipfile.ZipFile(io.BytesIO(result)).read("word/document.xml").decode()
    assert re.findall(r"<w:(instrText|delText)>(\w+)", content) == [("instrText", "PAGE"), ("delText", "old")]
    assert content.index("begin") < content.index("PAGE") < content.index('"end"')
    assert "üIn üa übox</w:t></w:r></w:p></w:txbxContent>" in content and "<w:t>ünew</w:t></w:r></w:ins>" in content
    assert zipfile.ZipFile(io.BytesIO(result)).read("docProps/x.bin") == b"\0\1"


def test_slides_cells_and_odt() -> None:
    drawing = "http://schemas.openxmlformats.org/drawingml/2006/main"
    slide = f'<s xmlns:a="{drawing}"><a:p><a:r><a:rPr lang="en"/><a:t>Big</a:t></a:r><a:r><a:rPr lang="de"/><a:t> news</a:t></a:r><a:endParaRPr/></a:p></s>'
    result = round_trip(archive({"ppt/slides/slide1.xml": slide}), "a.pptx")
    text = zipfile.ZipFile(io.BytesIO(result)).read("ppt/slides/slide1.xml").decode()
    assert '<a:p><a:r><a:rPr lang="en"/><a:t>üBig ünews</a:t></a:r><a:endParaRPr/></a:p>' in text
    main = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
    cells = f'<sst xmlns="{main}"><si><t>One cell</t></si><si><t>12</t></si></sst>'
    result = round_trip(archive({"xl/sharedStrings.xml": cells}), "a.xlsx")
    text = zipfile.ZipFile(io.BytesIO(result)).read("xl/sharedStrings.xml").decode()
    assert "<si><t>üOne ücell</t></si><si><t>12</t></si>" in text
    office = "urn:oasis:names:tc:opendocument:xmlns:text:1.0"
    paragraph = '<t:p>Some <t:span t:style-name="b">bold</t:span><t:s/><t:note><t:p>A note</t:p></t:note> text</t:p>'
    parts = {"content.xml": f'<d xmlns:t="{office}">{paragraph}</d>', "meta.xml": f"<m>{TITLE}</m>"}
    result = round_trip(archive(parts), "a.odt")
    assert (
        "<d:title>üA üreport</d:title><d:creator>Ann</d:creator>"
        in zipfile.ZipFile(io.BytesIO(result)).read("meta.xml").decode()
    )
    text = zipfile.ZipFile(io.BytesIO(result)).read("content.xml").decode()
    assert 'üSome <t:span t:style-name="b">übold</t:span><t:s/><t:note><t:p>üA ünote</t:p></t:note> ütext</t:p>' in text


PAGE = """<?xml version="1.0"?>
<!DOCTYPE html>
<html xmlns="http://www.w3.org/1999/xhtml" xml:lang="en"><head><title>One</title></head><body><p>Some&nbsp;text <i>here</i>.</p>
<hr/><p id="x">More &#8212; text</p></body></html>"""


def test_code_and_addresses_alone_are_no_texts() -> None:
    """They were asked for, and had a line in a review."""
    page = '<pre>code</pre><p><code>ls</code>&nbsp;</p><p translate="no">RWKV</p><p>https://a.example/b</p><p>A <b>b</b></p>'
    assert [unit.text for unit in read(page, "a.html").units] == ["A <b>b</b>"]


def test_books_keep_their_order_and_their_pages() -> None:
    file = zipfile.ZipFile(io.BytesIO(round_trip(epub(PAGE), "a.epub")))
    assert file.infolist()[0].filename == "mimetype" and file.infolist()[0].compress_type == zipfile.ZIP_STORED
    page = file.read("OEBPS/text 1.xhtml").decode()
    assert page.startswith(PAGE[: PAGE.index("xml:lang")]) and 'xml:lang="de"' in page
    assert '<p>üSome ütext <i>ühere</i>.</p>\n<hr/><p id="x">üMore — ütext</p>' in page
    assert "<text>üFirst üchapter</text>" in file.read("OEBPS/toc.ncx").decode()
    assert "<dc:title>üA üsmall übook</dc:title><dc:language>de</dc:language>" in file.read("OEBPS/book.opf").decode()
    for name in file.namelist()[1:]:
        etree.fromstring(file.read(name))


@pytest.mark.parametrize(
    ("name", "source", "result"),
    [
        ("a.md", "# Head\n\npara *x*\n", "# Head / üHead\n\npara *x*  \nüpara *üx*\n"),
        (
            "a.md",
            "---\ntitle: One\n---\n| A | `b` |\n|--|--|\n",
            "---\ntitle: One / üOne\n---\n| A / üA | `b` |\n|--|--|\n",
        ),
        ("a.txt", "One\n", "One\nüOne\n"),
        ("a.html", "<p>One <b>b</b></p>", "<p>One <b>b</b><br>üOne <b>üb</b></p>"),
        (
            "a.html",
            '<p id=p>B <a id="x" name=y href="#z">c</a><script>send()</script><input name=q></p>',
            '<p id=p>B <a id="x" name=y href="#z">c</a><script>send()</script><input name=q><br>üB <a href="#z">üc</a></p>',
        ),
        (
            "a.html",
            '<p>B <img src="a" data-x="our id = 5" id="x"> c <button name=b>Send</button></p>',
            '<p>B <img src="a" data-x="our id = 5" id="x"> c '
            '<br>üB <img src="a" data-x="our id = 5"> üc <button name=b>Send<br>üSend</button></p>',
        ),
        (
            "a.html",
            '<title>One</title><p>b <img alt="two"></p>',
            '<title>One / üOne</title><p>b <img alt="two / ütwo"><br>üb <img alt="two / ütwo"></p>',
        ),
        ("a.tsv", "id\ttext\n1\tHello\n", "id\ttext\ttext (de)\n1\tHello\tüHello\n"),
    ],
)
def test_bilingual_files_have_both(name: str, source: str, result: str) -> None:
    assert round_trip(source, name, is_bilingual=True).decode() == result


def test_bilingual_word_files_have_a_line_break() -> None:
    result = round_trip(docx(RUNS, **{"docProps/core.xml": TITLE}), "a.docx", is_bilingual=True)
    assert b"<d:title>A report / \xc3\xbcA \xc3\xbcreport<" in zipfile.ZipFile(io.BytesIO(result)).read(
        "docProps/core.xml"
    )
    assert (
        python_docx.Document(io.BytesIO(result)).paragraphs[0].text
        == "Hello bold world \ttablink\nüHello übold üworld \tütabülink"
    )


def test_broken_properties_stay_as_they_are() -> None:
    for broken in ("", "<a", '<!DOCTYPE a [<!ENTITY b "b">]><a>&b;</a>'):
        result = round_trip(docx(RUNS, **{"docProps/core.xml": broken}), "a.docx")
        assert zipfile.ZipFile(io.BytesIO(result)).read("docProps/core.xml").decode() == broken


def test_the_formats_own_libraries_read_the_results() -> None:
    srt = "1\n00:00:01,000 --> 00:00:02,000\nHello\n\n"
    assert pysubs2.SSAFile.from_string(round_trip(srt, "a.srt").decode())[0].text == "üHello"
    source = "a: [x, 'y: z', \"q\"]\nb: >-\n  folded\n  text\n"
    assert yaml.safe_load(round_trip(source, "a.yaml")) == {"a": ["üx", "üy: üz", "üq"], "b": "üfolded ütext"}
    rows = list(csv.reader(io.StringIO(round_trip('a,text\n1,"x ""y"", z"\n', "a.csv").decode())))
    assert rows == [["a", "text"], ["1", 'üx "üy", üz']]


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("你好，世界。今天天气很好。", "gb18030"),
        ("標題：你好，世界。今天天氣很好。", "big5"),
        ("こんにちは、世界。今日はいい天気です。", "cp932"),
        ("안녕하세요 세계. 오늘 날씨가 좋습니다.", "cp949"),
        ("Привет, мир. Сегодня хорошая погода.", "cp1251"),
        ("Café déjà vu, ça va? Où êtes-vous?", "cp1252"),
        ("Hello 你好", "utf-16"),
        ("Hello you", "utf-16-le"),
        ("猫在睡觉。\n狗喝水。\n", "gb18030"),
        ("大韓民國의 만세", "cp949"),
        ("문서를 엽니다", "cp949"),
        ("開啟檔案", "big5"),
        ("Hello", "utf-8-sig"),
    ],
)
def test_encodings_are_found_said_and_kept(text: str, encoding: str) -> None:
    source = decode(text.encode(encoding))
    assert source.text == text and source.notes and source.encode(text) == text.encode(encoding)


def test_an_odd_number_of_bytes_is_not_utf_16() -> None:
    assert decode(b"ab\0").text == "ab\0"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"Good morning\n\xff\xfe\x00bad\n", "byte 13, line 2), and its encoding is not known"),
        ("你好，世界。今天天气很好。\n".encode() + b"\xffbad\n", "byte 40, line 2), but mostly is"),
    ],
)
def test_a_broken_line_is_no_text_of_another_encoding(data: bytes, message: str) -> None:
    """The first was cp932 with characters for private use and a NUL, the second GB18030."""
    with pytest.raises(DocumentError, match=re.escape(message)):
        decode(data)
    assert decode("a\0b猫在睡觉。\n狗喝水。\n".encode("gb18030")).encoding == "gb18030"


def test_characters_that_the_encoding_lacks_make_utf_8_and_references_in_html() -> None:
    source = decode("voilà".encode("cp1252"), "cp1252")
    assert source.encode("你好").decode() == "你好" and "cp1252 lacks" in source.notes[-1]
    page = read('<meta charset="gbk"><p>你好</p>'.encode("gbk"), "a.html", "ko")
    assert page.write(["안녕"]) == '<meta charset="gbk"><p>&#50504;&#45397;</p>'.encode("gbk")


def test_equal_texts_are_one_request_and_short_ones_take_the_language_around_them() -> None:
    document = read("Guten Tag, wie geht es Ihnen heute?\nOK\nOK\nDas ist ein kurzer Satz.\n", "a.txt", "en")
    found = [body for _, body in requests(document, "auto", {"target_lang": "en"})]
    assert [body["text_list"] for body in found][1:] == [["OK"], ["Das ist ein kurzer Satz."]]
    assert {body["source_lang"] for body in found} == {"de"}


def bomb(name: str) -> bytes:
    return archive({name: b"0" * (40 << 20)})


def entities(root: str) -> bytes:
    declared = "".join(f'<!ENTITY l{i} "{f"&l{i - 1};" * 10}">' for i in range(1, 10))
    return f'<!DOCTYPE x [<!ENTITY l0 "lol">{declared}]>{root.replace("TEXT", "&l9;")}'.encode()


def external(root: str) -> bytes:
    return f'<!DOCTYPE x [<!ENTITY e SYSTEM "file:///etc/passwd">]>{root.replace("TEXT", "&e;")}'.encode()


DEEP = 10**6
ROOTS = {
    "xlf": '<xliff version="1.2"><file><body><trans-unit><source>TEXT</source></trans-unit></body></file></xliff>',
    "tmx": '<tmx><body><tu><tuv xml:lang="en"><seg>TEXT</seg></tuv></tu></body></tmx>',
    "tbx": "<tbx><text><body><conceptEntry><langSec><termSec><term>TEXT</term></termSec></langSec></conceptEntry>"
    "</body></text></tbx>",
    "xml": '<resources><string name="a">TEXT</string></resources>',
}
MEMBERS = {
    "docx": "word/document.xml",
    "pptx": "ppt/slides/slide1.xml",
    "xlsx": "xl/sharedStrings.xml",
    "odt": "content.xml",
    "epub": "META-INF/container.xml",
}
Hostile = tuple[str, Callable[[], bytes]]


def hostile_xml(ending: str, wrapped: Callable[[bytes], bytes] = bytes) -> list[Hostile]:
    root = ROOTS.get(ending, '<d xmlns="urn:x"><p>TEXT</p></d>')
    pieces = [
        entities(root), external(root), b"<a>" * DEEP, root[:-5].encode(), b"\xff\xfe<\0", b"", b"\0" * 1000,
        b'<?xml version="1.0" encoding="klingon"?>' + root.encode(), b"<!DOCTYPE x [" + b"<!ENTITY a 'b'>" * 10000,
        root.replace("TEXT", "&unknown;").encode(), b"<a " + b"b='c' " * DEEP + b"/>", b"<a>\x01</a>",
    ]  # fmt: skip
    return [(ending, lambda data=data: wrapped(data)) for data in pieces]  # type: ignore[misc]


def hostile_archives(ending: str) -> list[Hostile]:
    member = MEMBERS[ending]
    good = archive({member: "<d/>"})
    return [
        (ending, lambda: bomb(member)),
        (ending, lambda: archive({f"{i}": b"" for i in range(10_001)})),
        (ending, lambda: good[:-30]),
        (ending, lambda: b"PK\x03\x04" + b"\0" * 100),
        (ending, lambda: good.replace(b"\x00\x00\x08\x00", b"\x01\x00\x08\x00")),  # encrypted
        (ending, lambda: archive({"other.xml": "<a/>"})),
        (ending, lambda: archive({member: b"<d/>", "x": b"0" * (20 << 20)})),
        *hostile_xml(ending, lambda data: archive({member: data})),
    ]


HOSTILE: list[Hostile] = [
    *(one for ending in ROOTS for one in hostile_xml(ending)),
    *(one for ending in MEMBERS for one in hostile_archives(ending)),
    *(
        (ending, lambda data=data: data)
        for ending, pieces in {
            "json": [b"[" * DEEP, b'{"a":' * DEEP, b'{"a":1', b'{"a":"b"}}', b'"\\ud800', b'"' + b"\\" * DEEP, b'["a",' * DEEP,
                     b'{"a":"b" "c":"d"}', b"", b"nul", b'{"a":"x"' * DEEP],
            "xcstrings": [b"[" * DEEP, b"{}", b'{"strings":1}', b'{"strings":{},"sourceLanguage"', b'{"strings":[1]}', b"1", b"",
                          b'{"a":' * DEEP, b'"a"', b"null"],
            "yaml": [b"[" * DEEP, b"{a: " * DEEP, b"a:\n b:\n\tc", b"%YAML 9.9\n---\na: b", b"\x00", b"a: b: c: d", b"- " * 5000,
                     b"*unknown", b"a: 'b", b"&a " * 100],
            "po": [b"msgid", b'msgid "a"\nmsgid "b"', b'msgstr "x"', b"/etc/passwd", b'msgid "a"\nmsgstr[x] "b"', b'"' * DEEP,
                   b'"Content-Type: text/plain; charset=rot13\\n"', b"#~| " * DEEP, b"", b'msgid "a\nmsgstr ""'],
            "html": [b"<div>" * 200_000, b"<b>" * 200_000, b'<img alt="a">' * 100_001,
                     b'<meta charset="klingon">', b'<meta charset="rot13">', b'<meta charset="idna">x', b'<meta charset="ascii">\xff',
                     b'<?xml version="1.0" encoding="hex"?><p>a', b"<p>a</p>" * 100_001],
            "srt": [b"x", b"", b"1\n" * DEEP, b"- >", b"WEBVTT", b"\0" * 99, b"->" * DEEP, b"1\n2\n3",
                    b"\n" * DEEP],
            "csv": [b"", b"\n\n", b"a,b\n1,2", b'"' + b"a" * (1 << 24) + b'a"\n', b"text\n" + b"x\n" * 100_001,
                    b'"', b"id\ttext2", b"\xff\xfe\0"],
        }.items()
        for data in pieces
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("ending", "make"), rest_slow(HOSTILE, 60), ids=[f"{e}-{i}" for i, (e, _) in enumerate(HOSTILE)]
)
def test_hostile_files_are_refused_by_name(ending: str, make: Callable[[], bytes]) -> None:
    with pytest.raises(DocumentError, match=r"^\S.{10,}"):
        document = read(make(), f"a.{ending}")
        assert not document.units, "it has a text"
        raise DocumentError("there is no text to translate")


@pytest.mark.parametrize(
    ("ending", "data"),
    [
        ("yaml", b"a: &a b\n" + b"c: *a\n" * 10_000), ("json", b'{"a": "' + b"{a, plural, other {" * 500 + b'x"}'),
        ("po", b'msgid "' + b"a" * DEEP + b'"\nmsgstr ""\n'), ("arb", b'{"@a": ' + b"[" * 400 + b"]" * 400 + b"}"),
    ],
)  # fmt: skip
def test_hostile_texts_take_linear_time(ending: str, data: bytes) -> None:
    """A pattern that scans again from each position would take hours."""
    try:
        document = read(data, f"a.{ending}")
    except DocumentError:
        return
    document.write([unit.text for unit in document.units])


@pytest.mark.parametrize("ending", ["srt", "vtt"])
def test_subtitles_with_windows_line_breaks(ending: str) -> None:
    head = "WEBVTT\n\n" if ending == "vtt" else ""
    text = f"{head}1\n00:00:01.000 --> 00:00:02.000\nHello\n\n2\n00:00:03.000 --> 00:00:04.000\nBye\n".replace(
        "\n", "\r\n"
    )
    document = read(text.replace(".0", ",0").encode() if ending == "srt" else text.encode(), f"a.{ending}")
    assert [one.text for one in document.units] == ["Hello", "Bye"]
    without_blank = "1\n00:00:01,000 --> 00:00:02,000\nHello\n2\n00:00:03,000 --> 00:00:04,000\nBye\n"
    assert [one.text for one in read(without_blank.encode(), "a.srt").units] == ["Hello", "Bye"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.strings", b"a" * 200_000),
        ("a.strings", b'\\"' * 100_000),
        ("a.json", b'"\\' * 100_000),
        ("a.strings", b"/*" * 200_000),
    ],
)
def test_long_tokens_take_linear_time(name: str, content: bytes) -> None:
    with contextlib.suppress(DocumentError):
        read(content, name)


def test_other_compressions_are_refused() -> None:
    """Python decompresses them without a limit: 469 bytes took 800 MB."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("word/document.xml", bytes(1_000_000))
    with pytest.raises(DocumentError, match="other means than deflate"):
        read(file.getvalue(), "a.docx")


def test_a_language_is_no_part_of_a_path() -> None:
    assert translated_name("book.md", "../../x") == "book...-..-x.md" and translated_name("a.pot", "de") == "a.de.po"
