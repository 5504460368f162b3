"""Elements of HTML and XML: which tags end a segment, and whose content is not translated."""

from __future__ import annotations

import re

TAG = r"""</?[A-Za-z0-9](?:[^<>"']|"[^"]*"|'[^']*')*+>"""
"""Pattern of a tag. Translators' files have names that begin with a digit."""
XML_TAG = TAG.replace("[A-Za-z0-9]", r"[\w:]", 1)
"""The same in XML, whose names begin with letters of any script, `_` or `:`."""
BLOCKS = frozenset(
    "address article aside audio base blockquote body br button canvas caption center col colgroup dd details dialog "
    "div dl dt fieldset figcaption figure footer form h1 h2 h3 h4 h5 h6 head header hgroup hr html iframe legend li "
    "link main menu meta nav noscript object ol optgroup option p section select source summary table tbody td "
    "template textarea tfoot th thead title tr track ul video".split()
)
"""HTML's tags that end a segment."""
VERBATIM = frozenset("script style code kbd samp pre svg math".split())
"""HTML's elements without text to translate."""
_NO_TRANSLATE = re.compile(r"""\stranslate\s{0,9}=\s{0,9}["']?no["'\s/>]""", re.IGNORECASE)
_CLASS = re.compile(r"""\sclass\s{0,9}=\s{0,9}(?:"([^"]*)"|'([^']*)'|([^\s"'>]*))""", re.IGNORECASE)
_TAG = re.compile(XML_TAG)
_NAME = re.compile(r"</?([^\s<>/]+)")


def tag_name(tag: str) -> str:
    """Return the name of a tag, in lower case."""
    found = _NAME.match(tag)
    return found[1].lower() if found else ""


def is_protected(tag: str) -> bool:
    """Return whether an opening tag has translate="no" or the class notranslate."""
    classes = _CLASS.search(tag)
    names = "" if classes is None else next(filter(None, classes.groups()), "")
    return "notranslate" in names.split() or _NO_TRANSLATE.search(tag) is not None


def element_end(text: str, at: int, tag: str) -> int:
    """Return the end of the element whose opening tag ends at `at`. Without a closing tag it is the text's end."""
    if tag.endswith("/>"):
        return at
    depth = 1
    tags = re.compile(rf"<(/?){re.escape(tag_name(tag))}(?=[\s/>])[^<>]*+>", re.IGNORECASE)
    for found in tags.finditer(text, at):
        depth += -1 if found[1] else not found.group().endswith("/>")
        if not depth:
            return found.end()
    return len(text)


def structural_tags(text: str) -> frozenset[int]:
    """Return the positions of XML tags that split text: their parent has no text of its own."""
    parents: list[tuple[list[int], list[bool]]] = [([], [False])]
    """Per open element: the positions of its children's tags, and whether it has text."""
    splitting: set[int] = set()
    at = 0
    for found in _TAG.finditer(text):
        parents[-1][1][0] |= bool(text[at : found.start()].strip())
        at = found.end()
        tag = found.group()
        if tag.startswith("</"):
            if len(parents) > 1:
                _close(parents, splitting)
            parents[-1][0].append(found.start())
        else:
            parents[-1][0].append(found.start())
            if not tag.endswith("/>"):
                parents.append(([], [False]))
    parents[-1][1][0] |= bool(text[at:].strip())
    while parents:
        _close(parents, splitting)
    return frozenset(splitting)


def _close(parents: list[tuple[list[int], list[bool]]], splitting: set[int]) -> None:
    children, (has_text,) = parents.pop()
    if not has_text:
        splitting.update(children)
