"""LaTeX. Paragraphs, headings, captions and notes are translated; what is not known to be text stays byte for byte."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple

from pylatexenc.latex2text import LatexNodes2Text
from pylatexenc.latexwalker import (
    LatexCharsNode,
    LatexEnvironmentNode,
    LatexGroupNode,
    LatexMacroNode,
    LatexSpecialsNode,
    LatexWalker,
    LatexWalkerParseError,
    get_default_latex_context_db,
)
from pylatexenc.macrospec import EnvironmentSpec, MacroStandardArgsParser, ParsedMacroArgs, std_macro

from rwkv_batch.translation.documents.document import (
    Document,
    DocumentError,
    DocumentOptions,
    TextEdits,
    Unit,
    decode,
    text_document,
)
from rwkv_batch.translation.languages import base_language
from rwkv_batch.translation.markers import interleave
from rwkv_batch.translation.segments import Split, has_letters

_MAX_CHARACTERS = 4 << 20
"""The parser reads about 150,000 a second."""
_TEXT_MACROS = {
    **dict.fromkeys("emph textbf textit textsl textsc textrm textsf texttt textmd textup uline mbox text".split(), "{"),
    **dict.fromkeys("underline footnotetext".split(), "{"),
    "footnote": "[{", "href": "{{", "textcolor": "[{{", "enquote": "{",
}  # fmt: skip
"""Macros within a sentence -> their arguments. The last one is text."""
_BLOCK_MACROS = {
    **dict.fromkeys("part chapter section subsection subsubsection paragraph subparagraph caption".split(), "*[{"),
    **dict.fromkeys("title subtitle frametitle framesubtitle".split(), "[{"),
    "item": "[",
}  # fmt: skip
"""Macros whose last argument, if it has one, is a text of its own."""
_NEEDS_FONTS = {"zh", "ja", "ko"}
_BREAKS = {"\\", "par", "newline", "newpage", "clearpage", "tabularnewline", "hline"}
_ACCENTS = {*"'`^\"~=.", *"c v u H k r d b i j o O l L ss ae AE oe OE aa AA".split()}
_ESCAPED = {"%", "&", "#", "_", "$", "{", "}"}
_TEXT_ENVIRONMENTS = set(
    "document abstract itemize enumerate description quote quotation verse center flushleft flushright figure figure* "
    "table table* minipage tabular tabular* tabularx longtable multicols frame block alertblock exampleblock columns "
    "column theorem lemma proof definition corollary proposition remark example exercise letter titlepage sloppypar "
    "appendix acknowledgements acknowledgments".split()
)
_NEW_THEOREM = re.compile(r"\\(?:newtheorem|declaretheorem)\*?\s{0,9}(?:\[[^\]\n]{0,99}\])?\s{0,9}\{([\w*-]{1,64})\}")
_ENVIRONMENT = re.compile(r"\\begin\s*\{([^{}\s]{1,64})\}")
_BEGIN, _END = re.compile(r"^[^%\n]*?\\begin\s*\{document\}", re.MULTILINE), re.compile(r"\\end\s*\{document\}")
_TITLE = re.compile(r"^[^%\n]{0,99}?(\\(?:title|subtitle)\b)", re.MULTILINE)
_PARAGRAPH = re.compile(r"\n[^\S\n]*\n\s*")
_OPTION = re.compile(r"\s*\[[^\[\]]*\]")
_SYMBOLS = {"``": "“", "''": "”", "--": "–", "---": "—"}
_WRITTEN = str.maketrans(
    {text: latex for latex, text in _SYMBOLS.items()}
    | {one: f"\\{one}" for one in _ESCAPED}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
)


class _Kind(Enum):
    TEXT = 0
    MARK = 1
    OPEN = 2
    CLOSE = 3
    BREAK = 4


class _Token(NamedTuple):
    """A part of the file."""

    kind: _Kind
    start: int
    end: int
    text: str = ""
    """Of TEXT: what it means."""


def read_latex(data: bytes, options: DocumentOptions) -> Document:
    """Read LaTeX. Commands, formulas, code and unknown macros with their arguments stay. Raises DocumentError."""
    source = decode(data, options.encoding)
    text = source.text
    if len(text) > _MAX_CHARACTERS:
        raise DocumentError(f"has {len(text)} characters; the limit of LaTeX is {_MAX_CHARACTERS}; divide it")
    edits = TextEdits(text)
    begin = _BEGIN.search(text)
    start = begin.end() if begin else 0
    end = found.start() if begin and (found := _END.search(text, start)) else len(text)
    if base_language(options.target) in _NEEDS_FONTS:
        source.notes.append("compile the translation with XeLaTeX and a package for its letters, like ctex")
    tag = "m"
    while f"<{tag}" in text or f"</{tag}" in text:
        tag += "m"
    reader = _Reader(text[:end], set(_NEW_THEOREM.findall(text, 0, end)))
    for title in _TITLE.finditer(text, 0, start) if begin else ():
        _add(edits, reader.tokens(title.start(1), 1), tag)
    _add(edits, reader.tokens(start), tag)
    return text_document(source, edits)


class _UnreadContent(MacroStandardArgsParser):
    """Takes the content of an environment that is not known as its argument. It may be code."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._ends = re.compile(rf"\\(begin|end)\s*\{{{re.escape(name)}\}}")

    def parse_args(self, w: Any, pos: int, parsing_state: Any = None) -> tuple[ParsedMacroArgs, int, int]:
        depth = 1
        for found in self._ends.finditer(w.s, pos):
            depth += 1 if found[1] == "begin" else -1
            if not depth:
                return ParsedMacroArgs(), pos, found.start() - pos
        raise LatexWalkerParseError(s=w.s, pos=pos, msg="An environment has no end")


class _Reader:
    def __init__(self, text: str, environments: set[str]) -> None:
        self._text = text
        self._environments = _TEXT_ENVIRONMENTS | environments
        database = get_default_latex_context_db()
        macros = [std_macro(name, arguments) for name, arguments in (_TEXT_MACROS | _BLOCK_MACROS).items()]
        known = {one.environmentname for one in database.iter_environment_specs()} | self._environments
        unknown = set(_ENVIRONMENT.findall(text)) - known
        code = [EnvironmentSpec(name, args_parser=_UnreadContent(name)) for name in unknown]
        database.add_context_category("prose", prepend=True, macros=macros, environments=code)
        self._database = database
        self._decoder = LatexNodes2Text()

    def tokens(self, start: int, max_nodes: int | None = None) -> list[_Token]:
        """Return the tokens from a position. Raises DocumentError."""
        walker = LatexWalker(self._text, latex_context=self._database, tolerant_parsing=False)
        try:
            nodes = walker.get_latex_nodes(start, read_max_nodes=max_nodes)[0]
        except LatexWalkerParseError as error:
            line = self._text.count("\n", 0, error.pos or 0) + 1
            raise DocumentError(f"is not LaTeX that can be read: {error.msg} in line {line}; correct it") from None
        return list(self._of(nodes))

    def _of(self, nodes: Sequence[Any]) -> Iterator[_Token]:
        skipped = 0
        for number, node in enumerate(nodes):
            start, end = node.pos, node.pos + node.len
            if start < skipped:
                if end <= skipped:
                    continue
                start = skipped  # text after the arguments of an unknown macro
            if isinstance(node, LatexCharsNode):
                yield from self._text_tokens(start, end)
            elif isinstance(node, LatexGroupNode) and node.delimiters == ("{", "}"):
                if len(node.nodelist) == 1 and getattr(node.nodelist[0], "macroname", "") in _ACCENTS:
                    yield _Token(_Kind.TEXT, start, end, self._decoder.nodelist_to_text(node.nodelist))
                    continue
                yield _Token(_Kind.OPEN, start, start + 1)
                yield from self._of(node.nodelist)
                yield _Token(_Kind.CLOSE, end - 1, end)
            elif isinstance(node, LatexSpecialsNode):
                meaning = _SYMBOLS.get(node.specials_chars, "")
                is_break = node.specials_chars == "&" or node.specials_chars.isspace()
                yield _Token(_Kind.TEXT if meaning else _Kind.BREAK if is_break else _Kind.MARK, start, end, meaning)
            elif isinstance(node, LatexEnvironmentNode):
                if node.environmentname in self._environments:
                    yield from self._inside(node, node.nodelist, _Kind.BREAK, _Kind.BREAK)
                else:
                    is_math = getattr(self._database.get_environment_spec(node.environmentname), "is_math_mode", False)
                    yield _Token(_Kind.MARK if is_math else _Kind.BREAK, start, end)
            elif isinstance(node, LatexMacroNode):
                skipped = self._arguments_end(nodes, number)
                yield from self._macro(node, max(end, skipped))
            else:
                yield _Token(_Kind.MARK, start, end)

    def _macro(self, node: Any, end: int) -> Iterator[_Token]:
        name, start = node.macroname, node.pos
        arguments = node.nodeargd.argnlist if node.nodeargd is not None else ()
        last = arguments[-1] if arguments else None
        if isinstance(last, LatexGroupNode) and name in _TEXT_MACROS:
            yield from self._inside(node, last.nodelist, _Kind.OPEN, _Kind.CLOSE)
        elif isinstance(last, LatexGroupNode) and name in _BLOCK_MACROS:
            yield from self._inside(node, last.nodelist, _Kind.BREAK, _Kind.BREAK)
        elif name in _ESCAPED:
            yield _Token(_Kind.TEXT, start, start + 2, name)
            yield from self._text_tokens(start + 2, end)
        elif name in _ACCENTS:
            yield _Token(_Kind.TEXT, start, end, self._decoder.nodelist_to_text([node]))
        else:
            yield _Token(_Kind.BREAK if name in _BREAKS | {*_BLOCK_MACROS} else _Kind.MARK, start, end)

    def _inside(self, node: Any, nodes: Sequence[Any], opens: _Kind, closes: _Kind) -> Iterator[_Token]:
        """Yield the tokens of a node, whose content is `nodes`."""
        end = node.pos + node.len
        if not nodes:
            yield _Token(_Kind.MARK if opens is _Kind.OPEN else opens, node.pos, end)
            return
        yield _Token(opens, node.pos, nodes[0].pos)
        yield from self._of(nodes)
        yield _Token(closes, nodes[-1].pos + nodes[-1].len, end)

    def _arguments_end(self, nodes: Sequence[Any], number: int) -> int:
        """Return the end of what follows an unknown macro and may be its arguments. 0: the macro is known."""
        if self._database.get_macro_spec(nodes[number].macroname) is not None:
            return 0
        end: int = nodes[number].pos + nodes[number].len
        for index in range(number + 1, len(nodes)):
            later = nodes[index]
            later_end = later.pos + later.len
            if isinstance(later, LatexGroupNode):
                end = later_end
            elif isinstance(later, LatexCharsNode) and (found := _OPTION.match(self._text, end, later_end)):
                end = found.end()
            if end < later_end:
                break
        return end

    def _text_tokens(self, start: int, end: int) -> Iterator[_Token]:
        """Yield text, with a break at each blank line."""
        for gap in _PARAGRAPH.finditer(self._text, start, end):
            yield _Token(_Kind.TEXT, start, gap.start(), self._text[start : gap.start()])
            yield _Token(_Kind.BREAK, *gap.span())
            start = gap.end()
        yield _Token(_Kind.TEXT, start, end, self._text[start:end])


def _add(edits: TextEdits, tokens: Sequence[_Token], tag: str) -> None:
    """Add the texts between breaks. Everything in them that is no text becomes a tag."""
    part: list[_Token] = []
    for token in (*tokens, _Token(_Kind.BREAK, 0, 0)):
        if token.kind is _Kind.MARK and part and part[-1].kind is _Kind.MARK and part[-1].end == token.start:
            part[-1] = _Token(_Kind.MARK, part[-1].start, token.end)
            continue
        if token.kind is not _Kind.BREAK:
            part.append(token)
            continue
        if any(one.kind is _Kind.TEXT and has_letters(one.text) for one in part):
            _add_part(edits, part, tag)
        part = []


def _add_part(edits: TextEdits, part: Sequence[_Token], tag: str) -> None:
    names: list[str] = []
    opened: list[int] = []
    for number, token in enumerate(part):
        names.append("" if token.kind is _Kind.TEXT else f"<{tag}{number}/>")
        if token.kind is _Kind.OPEN:
            opened.append(number)
        elif token.kind is _Kind.CLOSE and opened:
            first = opened.pop()
            names[first], names[number] = f"<{tag}{first}>", f"</{tag}{first}>"
    raws = {name: edits.text[token.start : token.end] for name, token in zip(names, part, strict=True) if name}
    known = re.compile("|".join(map(re.escape, raws)) or r"(?!)")

    def encode(text: str) -> str:
        texts = [one.translate(_WRITTEN) for one in known.split(text)]
        return interleave(texts, [raws[name] for name in known.findall(text)])

    text = "".join(name or token.text for name, token in zip(names, part, strict=True))
    edits.add(part[0].start, part[-1].end, Unit(text, split=Split.WRAPPED), encode)
