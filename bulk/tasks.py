"""From a record to the body of one of the service's routes, and from that route's answer to a text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import msgspec

from bulk.records import LineError, Record

TRANSLATE, GENERATE, FILL = "/translate/v1/batch-translate", "/v1/chat/completions", "/FIM/v1/batch-FIM"
SCORE = "/v1/score"
TASKS = ("translate", "chat", "complete", "fim", "score")
OUT_FIELDS = {
    "translate": "translation",
    "chat": "answer",
    "complete": "completion",
    "fim": "middle",
    "score": "scores",
}
OF_JSON = frozenset({"score"})
"""Tasks whose answers are JSON values, not texts."""
_PLACE = re.compile(r"\{\{|\}\}|\{([^{}]+)\}")
_SEEDS = 2**64


class Ask(NamedTuple):
    """A question to a route."""

    path: str
    body: dict[str, Any]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of every record."""

    task: str
    field: str = "text"
    template: str = ""
    source_lang: str = "auto"
    target_lang: str = ""
    decode: dict[str, Any] = {}
    """Fields of the body, by their names in the HTTP interface; `seed` is that of the first record."""


class Task(Protocol):
    """One kind of work."""

    def ask(self, record: Record) -> Ask:
        """The question. Raises LineError if the record lacks what it needs."""

    def text(self, answer: Any) -> str:
        """The text of a good answer. Raises LineError if it is none after all."""


def make_task(plan: Plan) -> Task:
    """The task of a plan."""
    match plan.task:
        case "translate":
            return _Translate(plan)
        case "score":
            return _Score(plan)
        case _:
            return _Generate(plan)


def filled(template: str, fields: Mapping[str, Any]) -> str:
    """`{name}` replaced by the record's field, `{{` and `}}` by braces. Raises LineError if there is no such field."""

    def value(place: re.Match[str]) -> str:
        name = place.group(1)
        return place.group(0)[0] if name is None else _text(fields, name)

    return _PLACE.sub(value, template)


def _text(fields: Mapping[str, Any], name: str) -> str:
    if name not in fields:
        raise LineError(f"has no field {name!r}, only {', '.join(sorted(fields)) or 'none'}")
    value = fields[name]
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise LineError(f"field {name!r} must be text, got {type(value).__name__}")


class _Translate:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def ask(self, record: Record) -> Ask:
        """See Task."""
        plan = self._plan
        text = filled(plan.template, record.fields) if plan.template else _text(record.fields, plan.field)
        languages = {"source_lang": plan.source_lang, "target_lang": plan.target_lang}
        return Ask(TRANSLATE, {**languages, "text_list": [text], **plan.decode})

    def text(self, answer: Any) -> str:
        """See Task."""
        return str(answer["translations"][0]["text"])


class _Score:
    """A prompt, and `candidates`: a text or a list of them."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def ask(self, record: Record) -> Ask:
        """See Task."""
        plan, fields = self._plan, record.fields
        text = filled(plan.template, fields) if plan.template else _text(fields, plan.field)
        given = fields.get("candidates")
        candidates = given if isinstance(given, list) else [_text(fields, "candidates")]
        return Ask(SCORE, {"contents": [text], "candidates": candidates})

    def text(self, answer: Any) -> str:
        """The candidates' scores, as JSON."""
        return json.dumps(answer["scores"][0]["candidates"], ensure_ascii=False)


class _Generate:
    """chat, complete and fim: the native batch form with one row."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def ask(self, record: Record) -> Ask:
        """See Task."""
        decode = dict(self._plan.decode)
        if "seed" in decode:
            decode["seed"] = (decode["seed"] + record.index) % _SEEDS
        prompt = self._prompt(record.fields)
        return Ask(FILL if self._plan.task == "fim" else GENERATE, {**prompt, **decode})

    def _prompt(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        plan = self._plan
        if plan.task == "fim":
            return {"prefix": [_text(fields, "prefix")], "suffix": [_text(fields, "suffix")]}
        if plan.task == "chat" and not plan.template and isinstance(fields.get("messages"), list):
            return {"messages": fields["messages"]}
        text = filled(plan.template, fields) if plan.template else _text(fields, plan.field)
        return {"contents": [text]} if plan.task == "complete" else {"messages": [{"role": "user", "content": text}]}

    def text(self, answer: Any) -> str:
        """See Task."""
        choice = answer["choices"][0]
        if choice["finish_reason"] not in ("stop", "length"):
            raise LineError(choice.get("error") or f"did not end in time ({choice['finish_reason']})")
        return str(choice["message"]["content"])
