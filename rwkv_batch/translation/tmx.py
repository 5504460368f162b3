"""Pairs of a translation memory file (TMX)."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rwkv_batch.translation.languages import base_language

if TYPE_CHECKING:
    from lxml import etree

MAX_CHARACTERS = 4000
"""Of a text or its translation; longer ones are left out."""
_MAX_VARIANTS = 100
"""Variants of an entry. Each pair of them is compared."""
_XML_LANG = "{http://www.w3.org/XML/1998/namespace}lang"
_ANY = "*all*"


class TmxError(ValueError):
    """A file that is no TMX, with the reason."""


@dataclass(frozen=True, slots=True)
class TmxPair:
    """A text and its translation."""

    line: int
    """of the entry in the file"""
    source_language: str
    language: str
    text: str
    translation: str


def read_pairs(content: bytes) -> Iterator[TmxPair]:
    """Yield the translations of each entry's source language. Raises TmxError.

    The parser replaces entities that the file defines, and limits how far they grow. Others are an error.
    """
    from lxml import etree  # loads with the first file

    source_lang = ""
    try:
        for _, element in etree.iterparse(
            io.BytesIO(content), tag=("header", "tu"), resolve_entities="internal", no_network=True, load_dtd=False
        ):
            if element.tag == "header":
                source_lang = element.get("srclang") or ""
                continue
            own, line = element.get("srclang") or source_lang, element.sourceline or 0
            texts = [variant for one in element.iterfind("tuv") for variant in _variant(one)]
            if len(texts) > _MAX_VARIANTS:
                raise TmxError(f"has an entry of more than {_MAX_VARIANTS} variants; split it")
            element.clear()
            parent = element.getparent()
            while parent is not None and element.getprevious() is not None:
                del parent[0]
            for (of, text), (to, translation) in itertools.permutations(texts, 2):
                is_source = own in ("", _ANY) or base_language(of) == base_language(own)
                if is_source and base_language(of) != base_language(to):
                    yield TmxPair(line, of, to, text, translation)
    except etree.LxmlError as error:
        raise TmxError(f"must be a TMX file: {str(error)[:200]}") from None


def _variant(tuv: etree._Element) -> Iterator[tuple[str, str]]:
    """Yield language and text of a variant, if they are valid."""
    lang, seg = tuv.get(_XML_LANG) or tuv.get("lang") or "", tuv.find("seg")
    text = "" if seg is None else "".join(seg.itertext()).strip()
    if lang and text and len(text) <= MAX_CHARACTERS:
        yield lang, text
