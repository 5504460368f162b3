"""The API reference: sections from the OpenAPI document, as Markdown or as a web page.

`python -m routes.reference` writes docs/api.md.
"""

from __future__ import annotations

import html
import json
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from routes.docs.openapi import FORM
from routes.response.http_response import FILE, JSON, XML

SERVER = "http://localhost:8000"
_SCHEMAS = "#/components/schemas/"
_LIMITS = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "< {}",
    "minLength": "≥ {} characters",
    "maxLength": "≤ {} characters",
    "minItems": "≥ {} entries",
    "maxItems": "≤ {} entries",
    "maxProperties": "≤ {} entries",
}
TITLE = "HTTP API"
INTRODUCTION = (
    "**Authentication.** With a password or API keys, every route except the public ones requires one: in the header "
    "`Authorization: Bearer …` or `x-api-key: …`, or in the JSON field `password`.",
    "**Models.** `model` names the model, and may add a state or an adapter. `NAME:latest` is `NAME`. An unknown name "
    "is answered by the service's model with an entry in `warnings`. It is 404 if it begins with `ft:`, on Ollama's "
    "routes, and with `--strict-model` or `--models-dir`.",
    "**Bodies.** null means the default. Unknown fields, fields that are accepted and ignored, unknown languages, and "
    "a query that the route does not read become entries of the answer's `warnings`: "
    '`{"field": …, "message": …}`. The message has the nearest known name. A long list is cut. A stream has it in its '
    "first event. The access log has the fields' names as `ignored`. With `--strict-fields`, unknown fields, languages "
    "and queries are refused. Both hold for bodies, and for queries of routes that list query fields. A route "
    "without fields, like most GET routes, ignores its query.",
    "**Request ids.** Every answer has the header `X-Request-Id`, and `Request-Id` for Anthropic's "
    "clients. A client may send its own id, of at most 128 "
    "letters, digits and `. : / + = @ - _`. Errors repeat it as `request_id`.",
    "**Streams.** A stream consists of server-sent events and ends with `data: [DONE]`. An error within a stream is "
    'the event `data: {"error": …}`. Ollama\'s streams are JSON lines (`application/x-ndjson`), and an error is a line '
    "`{\"error\": …}`. Anthropic's events have names and end with `message_stop`. llama.cpp's end with `stop`: true. "
    "These have no `[DONE]`.",
    "**Status.** An error before the answer begins has its HTTP status. Answers without a stream begin when they are "
    "complete. A stream begins when the request is admitted. The stream of a session's turn begins with its first "
    "token, or after two seconds. Ollama's streams begin with the first token.",
    "**Errors.** Native routes answer with `error` as text. Routes of OpenAI's API answer with OpenAI's error object. "
    "`/v1/chat/completions` and `/v2/chat/completions` do so for a body with `messages`. Anthropic's routes answer "
    "with Anthropic's error object.",
    '**Errors after status 200.** In a stream they are the event `data: {"error": …}`. So check for `error` first. '
    "In an answer of several rows, a failed row has `error` in its choice.",
    "**Timeouts.** A stream has a heartbeat every 0.25 s, so a read timeout of the client never expires. An answer "
    "without a stream sends nothing until it is complete. Give clients and proxies a longer read timeout than the "
    "answer takes, or use a stream. `timeout_s` limits the answer itself.",
    "**Disconnects.** A request ends within a second after its client has closed the connection. A client that only "
    "shuts down its sending side counts as gone.",
    "**Sessions.** A turn that is cancelled or ends with `timeout` does not change its session. If the engine is lost "
    "during a turn, the turn may have been stored. The error says how to check.",
)
"""Rules of all routes: a name in bold and the rule."""
ANSWERS = "Answers"
ABOUT_ANSWERS = "These are the parts of answers. New fields may be added, so clients should ignore unknown fields."


@dataclass(frozen=True, slots=True)
class FieldLine:
    name: str
    type: str
    default: str
    limits: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Section:
    """One method on one path."""

    title: str
    text: str
    fields: list[FieldLine]
    answers: list[str]
    """Content types of a successful answer, with their schemas."""
    errors: list[tuple[str, str]]
    curl: str


@dataclass(frozen=True, slots=True)
class AnswerSchema:
    """The fields of an answer, or of a part of it."""

    name: str
    text: str
    fields: list[tuple[str, str, str]]
    """Name, type and meaning."""


_FILES = {FILE: "session.safetensors", XML: "memory.tmx"}
"""Example files of uploads and downloads."""


def sections(document: dict[str, Any]) -> list[Section]:
    """Return one section per operation of an OpenAPI document, in its order."""
    schemas = document["components"]["schemas"]
    return [
        _section(path, method.upper(), operation, schemas)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]


def _section(path: str, method: str, operation: dict[str, Any], schemas: dict[str, Any]) -> Section:
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    schema = schemas[body["schema"]["$ref"].removeprefix(_SCHEMAS)] if body else {}
    required = schema.get("required", [])
    fields = [_field(name, one, name in required) for name, one in schema.get("properties", {}).items()]
    parameters = operation.get("parameters", [])
    known = schema.get("properties", {})
    fields += [_field(one["name"], one["schema"], one["required"]) for one in parameters if one["name"] not in known]
    (_, success), *failures = operation["responses"].items()
    errors = [(status, one["description"]) for status, one in failures]
    text = operation["description"] if "security" in operation else f"{operation['description']} Public."
    in_path = {one["name"]: one["example"] for one in parameters if one["in"] == "path"}
    command = curl(method, path.format(**in_path), body.get("example"))
    if FORM in operation:
        parts = (shlex.quote(f"{name}={value}") for name, value in operation[FORM].items())
        command = " -F ".join([f"curl {SERVER}{path}", *parts])
    good = success.get("content", {})
    if parameters and not in_path:
        query = urlencode({one["name"]: one["example"] for one in parameters if "example" in one})
        uploads = operation.get("requestBody", {}).get("content", {})
        if method == "GET":
            option = "" if JSON in good else f" -o {_FILES[FILE]}"
        else:
            option = "".join(f" --data-binary @{_FILES[kind]}" for kind in uploads) or f" -X {method}"
        command = f"curl{option} '{SERVER}{path}{'?' if query else ''}{query}'"
    answers = [f"{kind} {' or '.join(_names(content))}".rstrip() for kind, content in good.items()]
    return Section(f"{method} {path}", text, fields, answers, errors, command)


def answer_schemas(document: dict[str, Any]) -> list[AnswerSchema]:
    """Return all schemas of answers in the order of the routes. Parts follow the whole."""
    schemas = document["components"]["schemas"]
    found: dict[str, AnswerSchema] = {}

    def enter(node: Any) -> None:
        for name in _names(node):
            if name not in found:
                found[name] = _answer_schema(name, schemas[name])
                enter(schemas[name])

    enter([one["responses"] for operations in document["paths"].values() for one in operations.values()])
    return list(found.values())


def _answer_schema(name: str, schema: dict[str, Any]) -> AnswerSchema:
    if "enum" in schema:
        return AnswerSchema(name, f"{schema['description']} One of {', '.join(_types(schema))}.", [])
    fields = []
    for field, one in schema["properties"].items():
        types = list(dict.fromkeys(_types(one)))
        if field not in schema.get("required", ()):
            types.append("missing")
        elif any(branch.get("type") == "null" for branch in one.get("anyOf", [one])):
            types.append("null")
        fields.append((field, " or ".join(types), one.get("description", "")))
    return AnswerSchema(name, schema["description"], fields)


def _names(node: Any) -> Iterator[str]:
    """Yield the schemas that a part of the document refers to. Keeps their order."""
    if isinstance(node, dict):
        if "$ref" in node:
            yield str(node["$ref"]).removeprefix(_SCHEMAS)
        node = list(node.values())
    for one in node if isinstance(node, list) else ():
        yield from _names(one)


def curl(method: str, path: str, example: dict[str, Any] | None) -> str:
    """Return a curl command for a service at SERVER."""
    if example is None:
        return f"curl {'' if method == 'GET' else f'-X {method} '}{SERVER}{path}"
    body = shlex.quote(json.dumps(example, ensure_ascii=False))
    flag = " -N" if example.get("stream") else ""
    return f"curl{flag} {SERVER}{path} -H 'Content-Type: application/json' -d {body}"


def _field(name: str, schema: dict[str, Any], is_required: bool) -> FieldLine:
    default = "required" if is_required else json.dumps(schema.get("default"), ensure_ascii=False)
    limits = ", ".join(dict.fromkeys(_limits(schema)))
    return FieldLine(name, " or ".join(dict.fromkeys(_types(schema))), default, limits, schema.get("description", ""))


def _branches(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for branch in schema.get("anyOf", [schema]):
        if branch.get("type") != "null":
            yield branch


def _types(schema: dict[str, Any]) -> Iterator[str]:
    for branch in _branches(schema):
        if "$ref" in branch:
            yield str(branch["$ref"]).removeprefix(_SCHEMAS)
        elif "enum" in branch or "const" in branch:
            yield ", ".join(f"`{value}`" for value in branch.get("enum", [branch.get("const")]) if value != "")
        elif branch.get("type") == "array":
            yield f"[{' or '.join(dict.fromkeys(_types(branch['items'])))}]"
        else:
            yield str(branch.get("type", "any"))


def _limits(schema: dict[str, Any]) -> Iterator[str]:
    for branch in _branches(schema):
        yield from (text.format(branch[key]) for key, text in _LIMITS.items() if key in branch)


def markdown(document: dict[str, Any]) -> str:
    rules = "\n".join(f"- {rule}" for rule in INTRODUCTION)
    opening = "After this page you can call every route. These rules hold for all of them:"
    parts = [f"# {TITLE}\n\n{opening}\n\n{rules}\n\nWritten by `python -m routes.reference`.\n"]
    for section in sections(document):
        parts.append(f"## {section.title}\n\n{section.text}\n\n```sh\n{section.curl}\n```\n")
        if section.fields:
            rows = ["| field | type | default | limits | meaning |", "|---|---|---|---|---|"]
            for one in section.fields:
                cells = (f"`{one.name}`", one.type, f"`{one.default}`", one.limits, one.meaning)
                rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
            parts.append("\n".join(rows) + "\n")
        parts.append(f"Answer: {'; '.join(section.answers)}.\n")
        if section.errors:
            parts.append("Errors: " + " ".join(f"**{status}** {text}" for status, text in section.errors) + "\n")
    parts.append(f"## {ANSWERS}\n\n{ABOUT_ANSWERS}\n")
    for answer_schema in answer_schemas(document):
        parts.append(f"### {answer_schema.name}\n\n{answer_schema.text}\n")
        if answer_schema.fields:
            rows = ["| field | type | meaning |", "|---|---|---|"]
            rows += [f"| `{name}` | {kind} | {meaning} |" for name, kind, meaning in answer_schema.fields]
            parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em; }
pre, code { background: #f2f2f2; padding: 0 .2em; border-radius: 3px; }
pre { padding: .6em; white-space: pre-wrap; overflow-wrap: anywhere; }
table { border-collapse: collapse; } td:first-child { white-space: nowrap; }
td, th { border: 1px solid #ccc; padding: .2em .5em; text-align: left; vertical-align: top; }
td:last-child { min-width: 20em; }
summary { font-weight: 600; cursor: pointer; padding: .3em 0; }
@media (prefers-color-scheme: dark) {
  body { background: #181818; color: #ddd; } pre, code { background: #262626; }
  a { color: #7cb0ff; } a:visited { color: #c3a5ff; }
}
@media (max-width: 50em) {
  tr:has(th) { display: none; } tr, td { display: block; border: 0; padding: 0; } td:last-child { min-width: 0; }
  tr { border-top: 1px solid #ccc; padding: .3em 0; }
}
"""


def page(document: dict[str, Any]) -> str:
    """Return the reference as a web page without scripts and network access."""
    body = "".join(map(_html_section, sections(document)))
    body += f"<h2>{ANSWERS}</h2><p>{ABOUT_ANSWERS}</p>{''.join(map(_html_answer_schema, answer_schemas(document)))}"
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>{TITLE}</title><style>{_STYLE}</style>"
    rules = "".join(f"<li>{_prose(rule)}</li>" for rule in INTRODUCTION)
    introduction = f'<ul>{rules}</ul><p><a href="/openapi.json">openapi.json</a></p>'
    return f'<!doctype html><html lang="en">{head}<h1>{TITLE}</h1>{introduction}{body}</html>'


def _prose(text: str) -> str:
    """Return Markdown with bold and code as HTML."""
    return re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", re.sub(r"`(.+?)`", r"<code>\1</code>", html.escape(text)))


def _html_rows(rows: Iterable[tuple[str, ...]]) -> str:
    return "".join("<tr>" + "".join(f"<td>{_prose(cell)}</td>" for cell in row) + "</tr>" for row in rows)


def _html_section(section: Section) -> str:
    escape = html.escape
    rows = _html_rows(
        (f"`{one.name}`", one.type, f"`{one.default}`", one.limits, one.meaning) for one in section.fields
    )
    head = "<tr><th>field<th>type<th>default<th>limits<th>meaning</tr>"
    table = f"<table>{head}{rows}</table>" if rows else ""
    answers = "; ".join(map(escape, section.answers))
    errors = "".join(f"<li><b>{status}</b> {_prose(text)}</li>" for status, text in section.errors)
    return (
        f"<details><summary>{escape(section.title)}</summary><p>{_prose(section.text)}</p>"
        f"<pre>{escape(section.curl)}</pre>{table}<p>Answer: {answers}.</p><ul>{errors}</ul></details>"
    )


def _html_answer_schema(answer_schema: AnswerSchema) -> str:
    rows = _html_rows(answer_schema.fields)
    table = f"<table><tr><th>field<th>type<th>meaning</tr>{rows}</table>" if rows else ""
    return (
        f"<details><summary>{html.escape(answer_schema.name)}</summary><p>{_prose(answer_schema.text)}</p>"
        f"{table}</details>"
    )
