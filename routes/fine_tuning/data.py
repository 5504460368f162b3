"""Data files of a tuning: JSON lines of chats or of prompts with completions, CSV pairs and TMX. Finds errors by line.

A line's texts are tokenised as serving does: each prompt at once, then the answer, the blank line that ends it, and the
end of text after the last one. Only answers count in the loss.
"""

from __future__ import annotations

import csv
import itertools
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field, ValidationError
from pydantic_core import PydanticCustomError

from routes.openai.tools import ChatTools, chat_tool_set, wrong_calls
from routes.request import prompts
from routes.request.bodies import Template
from routes.request.fields import Fields, reject_values
from routes.request.json_body import parse_json, validate
from routes.request.messages import Message
from routes.request.validation import MAX_WARNINGS, find_ignored, nearest_name
from rwkv_batch.errors import ServiceError
from rwkv_batch.tokenizer import END_OF_TEXT, Tokenizer
from rwkv_batch.translation.languages import is_known_language, language_name
from rwkv_batch.translation.tmx import TmxError, read_pairs
from rwkv_batch.tuning import Document
from rwkv_batch.turn_text import format_turn

MAX_ERRORS = 100
MAX_LINES = 1_000_000
MAX_TOKENS = 4096
"""Default of a line's maximum."""
MAX_HELD_OUT = 1000
"""Lines that are evaluated. More take longer and hardly change the loss."""
MIN_DIFFERENT = 20
"""Fewer different lines are worth a warning."""
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n|\Z)")
_PLACE = re.compile(r" at line \d+ column (\d+)(?=\)?$)")
"""Where the JSON parser sees an error. Its line is not the file's."""
_INDEX = re.compile(r"\[\d+\]")
_UTF8_MARK = b"\xef\xbb\xbf"
_PROMPT, _COMPLETION = "prompt", "completion"
_Texts = str | Annotated[list[str], Field(min_length=1, max_length=1024)]


class TrainingMessage(Message):
    """A message of a chat. Answers with weight 0 are read, but not learnt."""

    weight: Literal[0, 1] = 1


class DataLine(Fields):
    """A line of a data file: a chat, or a prompt and its completion. Lists of these have an entry per round."""

    messages: Annotated[list[TrainingMessage], Field(max_length=4096, fail_fast=True)] = Field([])
    tools: ChatTools = Field([])
    template: Template | None = None
    functions: Annotated[Any, reject_values("is the old form of tools, which is not supported; use tools")] = None
    prompt: _Texts = ""
    completion: _Texts = ""


class LineProblem(msgspec.Struct, frozen=True):
    """An error of a data file."""

    line: int
    """from 1; 0: of the whole file"""
    field: str
    reason: str

    def __str__(self) -> str:
        """Return the error in one line."""
        where = f"line {self.line}" if self.line else "the file"
        return f"{where}: {self.field}: {self.reason}" if self.field else f"{where}: {self.reason}"


class UnknownFields:
    """Names that lines have, but the format does not. Such a field changes nothing."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, int, str]] = {}
        """name -> the first line, how many have it, the nearest known name"""

    def add(self, number: int, row: DataLine, given: Mapping[str, Any]) -> None:
        """Add a line's names. Beyond MAX_WARNINGS different ones, only their number counts."""
        for one in find_ignored(row, given):
            name = _INDEX.sub("[]", one.field)
            if not one.known or (name not in self._found and len(self._found) > MAX_WARNINGS):
                continue
            first, count, nearest = self._found.get(name, (number, 0, ""))
            self._found[name] = first, count + 1, nearest if count else nearest_name(name.rpartition(".")[2], one.known)

    @property
    def warnings(self) -> list[str]:
        """A sentence for each name."""
        found = [
            f"the field {name} is not known and changes nothing (first in line {first}, {count} in all){nearest}"
            for name, (first, count, nearest) in self._found.items()
        ]
        return found[:MAX_WARNINGS] + [f"more than {MAX_WARNINGS} unknown fields"] * (len(found) > MAX_WARNINGS)


@dataclass(slots=True)
class Data:
    """A data file's examples, or its first errors."""

    examples: list[Document] = field(default_factory=list)
    problems: list[LineProblem] = field(default_factory=list)
    num_repeated: int = 0
    """lines that equal an earlier one"""
    unknown: UnknownFields = field(default_factory=UnknownFields)

    @property
    def num_tokens(self) -> int:
        return sum(len(example.ids) for example in self.examples)

    @property
    def repeats(self) -> list[str]:
        """A warning about repeated lines, if there are some."""
        return [f"{self.num_repeated} of {len(self.examples)} lines repeat another one"] * bool(self.num_repeated)

    @property
    def warnings(self) -> list[str]:
        """Reasons to expect a bad result."""
        found = self.unknown.warnings + self.repeats
        if (different := len(self.examples) - self.num_repeated) < MIN_DIFFERENT:
            found.append(f"only {different} lines differ; {MIN_DIFFERENT} or more make a useful result likely")
        return found


def read_data(content: bytes, name: str, max_tokens: int = MAX_TOKENS) -> Data:
    """Return a data file's examples. The end of `name` decides its format; `max_tokens` is a line's limit."""
    data, seen = Data(), set[int]()
    for found in _examples(content, name, max_tokens, data.unknown):
        if isinstance(found, LineProblem):
            data.problems.append(found)
            continue
        key = hash(tuple(found.ids))
        data.num_repeated += key in seen
        seen.add(key)
        data.examples.append(found)
    return data


def validation_warnings(data: Data, held_out: Data) -> list[str]:
    """Return reasons why the figures of a validation file say little, and its unknown fields."""
    trained = {hash(tuple(example.ids)) for example in data.examples}  # the lines themselves take 36 bytes a token
    known = sum(hash(tuple(example.ids)) in trained for example in held_out.examples)
    found = held_out.unknown.warnings + held_out.repeats
    if (count := len(held_out.examples)) > MAX_HELD_OUT:
        found.append(f"the first {MAX_HELD_OUT} of {count} lines are evaluated")
    if known:
        found.append(f"{known} of {len(held_out.examples)} lines are in the training file too; give others")
    return [f"validation file: {text}" for text in found]


def check_data(content: bytes, name: str, unknown: UnknownFields) -> tuple[list[LineProblem], int, int]:
    """Return a data file's first errors, and its numbers of examples and tokens. Keeps one example at a time."""
    problems, count, tokens = list[LineProblem](), 0, 0
    for found in _examples(content, name, MAX_TOKENS, unknown):
        if isinstance(found, LineProblem):
            problems.append(found)
        else:
            count, tokens = count + 1, tokens + len(found.ids)
    return problems, count, tokens


def _examples(content: bytes, name: str, max_tokens: int, unknown: UnknownFields) -> Iterator[Document | LineProblem]:
    """Yield examples, and up to MAX_ERRORS errors."""
    match name.lower().rpartition(".")[2]:
        case "csv":
            rows = _csv_rows(content)
        case "tmx":
            rows = _tmx_rows(content)
        case _:
            rows = _json_rows(content, max_tokens, unknown)
    tokenizer, num_problems, number = Tokenizer(), 0, 0
    for number, row in rows:
        try:
            yield _tokenised(_segments(row), tokenizer, max_tokens)
        except _LineError as error:
            yield LineProblem(number, error.field, error.reason)
            num_problems += 1
            if num_problems >= MAX_ERRORS:
                return
    if not number and not num_problems:
        yield LineProblem(0, "", "has no lines")


def split(examples: Sequence[Document], share: float) -> tuple[list[Document], list[Document]]:
    """Return the examples to train on and the held-out ones.

    About `share` of the different examples are held out, at most MAX_HELD_OUT.
    """
    different = {tuple(example.ids): example for example in examples}
    every = max(2, round(1 / max(share, 1e-9)), -(-len(different) // MAX_HELD_OUT)) if share else len(different) + 1
    held = dict(itertools.islice(different.items(), every - 1, None, every))
    return [example for example in examples if tuple(example.ids) not in held], list(held.values())


class _LineError(Exception):
    def __init__(self, name: str, reason: str) -> None:
        super().__init__(reason)
        self.field, self.reason = name, reason


def _not_utf8(error: UnicodeDecodeError) -> _LineError:
    return _LineError("", f"is not UTF-8 ({error.reason} at its byte {error.start}); save the file as UTF-8")


_Row = DataLine | _LineError
_Segment = tuple[str, str, int]
"""prompt, answer, weight of the answer"""


def _lines(content: bytes) -> Iterator[bytes]:
    """Yield the lines with their ends, one at a time: a list of all takes twice the file's memory."""
    start = len(_UTF8_MARK) * content.startswith(_UTF8_MARK)
    return (found[0] for found in _LINE.finditer(content, start))


def _json_rows(content: bytes, max_tokens: int, unknown: UnknownFields) -> Iterator[tuple[int, _Row]]:
    for number, line in enumerate(_lines(content), 1):
        if not line.strip():
            continue
        if number > MAX_LINES:
            yield number, _LineError("", f"is beyond the limit of {MAX_LINES} lines; split the file")
            return
        try:
            line.decode()
            given = parse_json(line.rstrip(), max_tokens)
            row = validate(DataLine, given)
            assert isinstance(given, dict), "another value has no fields, which is an error"
            unknown.add(number, row, given)
            yield number, row
        except UnicodeDecodeError as error:
            yield number, _not_utf8(error)
            return
        except ServiceError as error:
            name = error.info.field or ""
            reason = error.info.message.removeprefix(f"{name}: ")
            reason = _PLACE.sub(r" at its character \1", reason.replace("the body", "the line"))
            yield number, _LineError("" if name == "body" else name, reason)


def _csv_rows(content: bytes) -> Iterator[tuple[int, _Row]]:
    """Yield a CSV's pairs. Its first row names the columns: prompt and completion, or two languages."""
    reader = csv.reader((line.decode() for line in _lines(content)), strict=True)
    number = 1
    try:
        header = [name.strip() for name in next(reader, [])]
        if header != [_PROMPT, _COMPLETION] and (
            len(header) != 2 or not all(map(is_known_language, header)) or len({*map(language_name, header)}) == 1
        ):
            reason = f"must be prompt,completion or two languages like English,de, got {','.join(header)[:80]!r}"
            yield 1, _LineError("", reason)
            return
        number = reader.line_num + 1
        for cells in reader:
            if not any(cells):
                pass
            elif len(cells) != 2:
                yield number, _LineError("", f"has {len(cells)} cells, the header has 2")
            elif header == [_PROMPT, _COMPLETION]:
                yield number, validate(DataLine, {_PROMPT: cells[0], _COMPLETION: cells[1]})
            else:
                yield number, _translation(header[0], header[1], cells[0], cells[1])
            number = reader.line_num + 1
    except csv.Error as error:
        opened = _open_quote(itertools.islice(_lines(content), number - 1, reader.line_num))
        if opened is None or "expected after" in str(error):  # a quote within a cell
            yield reader.line_num, _LineError("", f"is not CSV: {error}")
        else:
            problem = "is too long" if "limit" in str(error) else "never ends"
            yield number + opened, _LineError("", f'is not CSV: a cell begins with a quote (") and {problem}: {error}')
    except UnicodeDecodeError as error:
        yield reader.line_num + 1, _not_utf8(error)


def _open_quote(lines: Iterator[bytes]) -> int | None:
    """Return the index of the line where a cell's quotes open and do not close; None if they close."""
    opened = None
    for index, line in enumerate(lines):
        if quotes := line.replace(b'""', b"").count(b'"'):
            opened = index if (opened is None) == bool(quotes % 2) else None
    return opened


def _tmx_rows(content: bytes) -> Iterator[tuple[int, _Row]]:
    """Yield a translation memory's pairs, from each entry's source language into the others."""
    count = 0
    try:
        for count, pair in enumerate(read_pairs(content), 1):
            if count > MAX_LINES:
                yield pair.line, _LineError("", f"is beyond the limit of {MAX_LINES} translations; split the file")
                return
            yield pair.line, _translation(pair.source_language, pair.language, pair.text, pair.translation)
    except TmxError as error:
        yield 0, _LineError("", str(error))
    else:
        if not count:
            yield (
                0,
                _LineError("", "has no translation from its source language; a TMX file has tu, tuv and seg elements"),
            )


def _translation(source: str, target: str, text: str, translation: str) -> _Row:
    """Return a pair as serving prompts for it. Languages are names or codes."""
    for name, given in ((source, text), (target, translation)):
        if not given.strip():
            return _LineError(name, "must not be empty")
    asked = f"{language_name(source)}: {format_turn(text)}\n\n{language_name(target)}:"
    return validate(DataLine, {_PROMPT: asked, _COMPLETION: f" {format_turn(translation)}"})


def _segments(row: _Row) -> list[_Segment]:
    """Return a line's rounds. Raises _LineError."""
    if isinstance(row, _LineError):
        raise row
    if bool(row.messages) == bool(row.prompt or row.completion):
        raise _LineError("messages", "give `messages`, or `prompt` and `completion`")
    if row.messages:
        return _chat_segments(row)
    for name, given in (("tools", row.tools), ("template", row.template)):
        if given:
            raise _LineError(name, "is for lines with `messages`; leave it out")
    asked = [row.prompt] if isinstance(row.prompt, str) else row.prompt
    answers = [row.completion] if isinstance(row.completion, str) else row.completion
    if len(asked) != len(answers):
        raise _LineError(_COMPLETION, f"has {len(answers)} texts, prompt has {len(asked)}; give one for each")
    for name, texts in ((_PROMPT, asked), (_COMPLETION, answers)):
        if not all(texts):
            raise _LineError(name, "must not be empty" if name in row.model_fields_set else "is missing")
    return [(one, other, 1) for one, other in zip(asked, answers, strict=True)]


def _chat_segments(row: DataLine) -> list[_Segment]:
    try:
        tools = chat_tool_set(row.tools, None, True)
    except (PydanticCustomError, ValidationError) as error:
        raise _LineError("tools", str(error)) from error
    template = row.template or prompts.DEFAULT_TEMPLATE
    found: list[_Segment] = []
    asked: list[Message] = []
    for i, message in enumerate(row.messages):
        if message.role != "assistant":
            asked.append(message)
            continue
        if not asked:
            raise _LineError(f"messages[{i}]", "an answer must follow a message of another role")
        for name, reason in wrong_calls(message, row.tools):
            raise _LineError(f"messages[{i}].{name}", reason)
        answer = prompts.turn_text(message)
        if not answer.strip():
            raise _LineError(f"messages[{i}].content", "must not be empty")
        listing = tools.listing if tools is not None and not found else ""
        prompt = prompts.chat(asked, prompts.Think.OFF, template=template, listing=listing)
        found.append((prompt, _answer_start(template.opening) + answer, message.weight))
        asked = []
    if asked or not found:
        raise _LineError("messages", "the last message must be the assistant's")
    if not any(weight for *_, weight in found):
        raise _LineError("messages", "at least one answer must have weight 1")
    return found


def _answer_start(opening: str) -> str:
    """Return what the model writes between a prompt's opening and the answer."""
    if opening.endswith("<think></think"):
        return ">\n"
    return " " if not opening else "" if opening[-1:].isspace() else "\n"


def _tokenised(segments: Sequence[_Segment], tokenizer: Tokenizer, max_tokens: int) -> Document:
    """Return a line's token ids. Raises _LineError."""
    ids, weights = array("H"), array("f")  # 6 bytes a token; lists take 44

    def add(tokens: list[int], weight: float) -> None:
        ids.extend(tokens)
        weights.extend([weight] * len(tokens))

    for prompt, answer, weight in segments:
        try:
            add(tokenizer.encode(prompt), 0.0)
            add([*tokenizer.encode(answer), prompts.BLANK_LINE], float(weight))
        except UnicodeEncodeError:
            raise _LineError("", "has a lone surrogate, which has no UTF-8 form") from None
    add([END_OF_TEXT], float(segments[-1][2]))
    if len(ids) - 1 > max_tokens:
        raise _LineError("", f"has {len(ids) - 1} tokens, the limit is {max_tokens}; shorten or split it")
    return Document(ids, weights)
