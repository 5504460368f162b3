"""Tasks: they turn a record into a request body, and the route's answer into text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec

from programs.record import LineError, Record
from rwkv_batch.translation.glossary import Glossary

TRANSLATE, CHAT, FIM = "/translate/v1/batch-translate", "/v1/chat/completions", "/FIM/v1/batch-FIM"
SCORE = "/v1/score"
TASKS = ("translate", "chat", "complete", "fim", "score")
OUT_FIELDS = {
    "translate": "translation",
    "chat": "answer",
    "complete": "completion",
    "fim": "middle",
    "score": "scores",
}
JSON_TASKS = frozenset({"score"})
"""Tasks with JSON answers."""
_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([^{}]+)\}")
_SEEDS = 2**64


class TaskRequest(NamedTuple):
    path: str
    body: dict[str, Any]


class TaskOptions(msgspec.Struct, frozen=True, kw_only=True):
    task: str
    field: str = "text"
    template: str = ""
    source_lang: str = "auto"
    target_lang: str = ""
    decode: dict[str, Any] = {}
    """Body fields by their names in the HTTP API. `seed` is the first record's."""


class Task(Protocol):
    def request(self, record: Record) -> TaskRequest:
        """Returns the request. Raises LineError if the record lacks a field."""

    def text(self, answer: Any) -> str:
        """Returns the answer's text. Raises LineError if the answer is an error."""


def make_task(task_options: TaskOptions, glossary: Glossary | None = None) -> Task:
    """Creates the task for the options."""
    match task_options.task:
        case "translate":
            return _Translate(task_options, glossary)
        case "score":
            return _Score(task_options)
        case _:
            return _Generate(task_options)


def fill_template(template: str, fields: Mapping[str, Any]) -> str:
    """Replaces `{name}` by the record's field, `{{` and `}}` by braces. Raises LineError for an unknown field."""

    def value(placeholder: re.Match[str]) -> str:
        name = placeholder.group(1)
        return placeholder.group(0)[0] if name is None else _text(fields, name)

    return _PLACEHOLDER.sub(value, template)


def _record_text(task_options: TaskOptions, fields: Mapping[str, Any]) -> str:
    """Returns the text of the template or the field. Raises LineError."""
    if task_options.template:
        return fill_template(task_options.template, fields)
    return _text(fields, task_options.field)


def _text(fields: Mapping[str, Any], name: str) -> str:
    if name not in fields:
        raise LineError(f"has no field {name!r}, only {', '.join(sorted(fields)) or 'none'}")
    value = fields[name]
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise LineError(f"field {name!r} must be text, got {type(value).__name__}")


def with_terms(body: dict[str, Any], glossary: Glossary | None) -> TaskRequest:
    terms = glossary.terms_in(body["text_list"][0]) if glossary is not None else {}
    return TaskRequest(TRANSLATE, {**body, "glossary": terms} if terms else body)


@dataclass(frozen=True, slots=True)
class _Translate:
    options: TaskOptions
    glossary: Glossary | None

    def request(self, record: Record) -> TaskRequest:
        text, options = _record_text(self.options, record.fields), self.options
        body = {"source_lang": options.source_lang, "target_lang": options.target_lang, "text_list": [text]}
        return with_terms(body, self.glossary)

    def text(self, answer: Any) -> str:
        return str(answer["translations"][0]["text"])


@dataclass(frozen=True, slots=True)
class _Score:
    """A Task: scores `candidates`, a text or a list, after a prompt."""

    options: TaskOptions

    def request(self, record: Record) -> TaskRequest:
        fields = record.fields
        text = _record_text(self.options, fields)
        given = fields.get("candidates")
        candidates = given if isinstance(given, list) else [_text(fields, "candidates")]
        return TaskRequest(SCORE, {"contents": [text], "candidates": candidates})

    def text(self, answer: Any) -> str:
        """Returns the candidates' scores as JSON."""
        return json.dumps(answer["scores"][0]["candidates"], ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class _Generate:
    """A Task: the tasks chat, complete and fim: one row in the native batch route."""

    options: TaskOptions

    def request(self, record: Record) -> TaskRequest:
        decode = dict(self.options.decode)
        if "seed" in decode:
            decode["seed"] = (decode["seed"] + record.index) % _SEEDS
        prompt = self._prompt(record.fields)
        return TaskRequest(FIM if self.options.task == "fim" else CHAT, {**prompt, **decode})

    def _prompt(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        task, template = self.options.task, self.options.template
        if task == "fim":
            return {"prefix": [_text(fields, "prefix")], "suffix": [_text(fields, "suffix")]}
        if task == "chat" and not template and isinstance(fields.get("messages"), list):
            return {"messages": fields["messages"]}
        text = _record_text(self.options, fields)
        return {"contents": [text]} if task == "complete" else {"messages": [{"role": "user", "content": text}]}

    def text(self, answer: Any) -> str:
        choice = answer["choices"][0]
        if choice["finish_reason"] not in ("stop", "length"):
            raise LineError(choice.get("error") or f"did not end in time ({choice['finish_reason']})")
        return str(choice["message"]["content"])
