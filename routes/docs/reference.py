"""The API reference: sections from the OpenAPI document, as Markdown or as a web page.

`python -m routes.reference` writes docs/api.md.
"""

from __future__ import annotations

import html
import json
import shlex
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple
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
_RULES = "\n".join(f"- {rule}" for rule in INTRODUCTION)
_ANSWER_HEAD = ("field", "type", "meaning")
_PIPE = r"\|"
ANSWERS = "Answers"
ABOUT_ANSWERS = "These are the parts of answers. New fields may be added, so clients should ignore unknown fields."


class Section(NamedTuple):
    """One method on one path, or the fields of an answer or of a part of it."""

    title: str
    text: str
    rows: list[tuple[str, ...]]
    """Fields of a method: name, type, default, limits and meaning. Of an answer: name, type and meaning."""
    curl: str = ""
    ends: tuple[str, ...] = ()
    """Answers and errors of a method."""

    @property
    def markdown(self) -> str:
        """The section without its title."""
        parts = [
            self.text,
            *([f"```sh\n{self.curl}\n```"] if self.curl else []),
            *map(_table, filter(None, [self.rows])),
        ]
        return "\n\n".join([*parts, *self.ends]) + "\n"


def _table(rows: list[tuple[str, ...]]) -> str:
    head = ("field", "type", "default", "limits", "meaning") if len(rows[0]) > len(_ANSWER_HEAD) else _ANSWER_HEAD
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(cell.replace('|', _PIPE) for cell in row)} |" for row in rows)])


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
    errors = " ".join(f"**{status}** {one['description']}" for status, one in failures)
    text = operation["description"] if "security" in operation else f"{operation['description']} Public."
    in_path = {one["name"]: one["example"] for one in parameters if one["in"] == "path"}
    command = curl(method, path.format(**in_path), body.get("example"))
    if FORM in operation:
        parts = (shlex.quote(f"{name}={value}") for name, value in operation[FORM].items())
        command = " -F ".join([f"curl {SERVER}{path}", *parts])
    good = success.get("content", {})
    uploads = operation.get("requestBody", {}).get("content", {})
    if parameters and (not in_path or FILE in uploads):
        query = urlencode(
            {one["name"]: one["example"] for one in parameters if one["in"] == "query" and "example" in one}
        )
        if method == "GET":
            option = "" if JSON in good else f" -o {_FILES[FILE]}"
        elif method == "PUT":
            option = f" -T {in_path['filename']}"
        else:
            option = "".join(f" --data-binary @{_FILES[kind]}" for kind in uploads) or f" -X {method}"
        command = f"curl{option} '{SERVER}{path.format(**in_path)}{'?' if query else ''}{query}'"
    kinds = {kind.replace("*", r"\*"): content for kind, content in good.items()}  # else */* is emphasis
    answers = "; ".join(f"{kind} {' or '.join(_names(content))}".rstrip() for kind, content in kinds.items())
    ends = (f"Answer: {answers}.", *([f"Errors: {errors}"] if errors else []))
    return Section(f"{method} {path}", text, fields, command, ends)


def answer_schemas(document: dict[str, Any]) -> list[Section]:
    """Return all schemas of answers in the order of the routes. Parts follow the whole."""
    schemas = document["components"]["schemas"]
    found: dict[str, Section] = {}

    def enter(node: Any) -> None:
        for name in _names(node):
            if name not in found:
                found[name] = _answer_schema(name, schemas[name])
                enter(schemas[name])

    enter([one["responses"] for operations in document["paths"].values() for one in operations.values()])
    return list(found.values())


def _answer_schema(name: str, schema: dict[str, Any]) -> Section:
    if "enum" in schema:
        return Section(name, f"{schema['description']} One of {', '.join(_types(schema))}.", [])
    rows: list[tuple[str, ...]] = []
    for field, one in schema["properties"].items():
        types = list(dict.fromkeys(_types(one)))
        if field not in schema.get("required", ()):
            types.append("missing")
        elif any(branch.get("type") == "null" for branch in one.get("anyOf", [one])):
            types.append("null")
        rows.append((f"`{field}`", " or ".join(types), one.get("description", "")))
    return Section(name, schema["description"], rows)


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
    flag = " -N" if example.get("stream") else "" if method == "POST" else f" -X {method}"
    return f"curl{flag} {SERVER}{path} -H 'Content-Type: application/json' -d {body}"


def _field(name: str, schema: dict[str, Any], is_required: bool) -> tuple[str, ...]:
    default = "required" if is_required else json.dumps(schema.get("default"), ensure_ascii=False)
    limits = ", ".join(dict.fromkeys(_limits(schema)))
    kinds = " or ".join(dict.fromkeys(_types(schema)))
    return f"`{name}`", kinds, f"`{default}`", limits, schema.get("description", "")


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
    opening = "After this page you can call every route. These rules hold for all of them:"
    parts = [f"# {TITLE}\n\n{opening}\n\n{_RULES}\n\nWritten by `python -m routes.reference`.\n"]
    parts += [f"## {section.title}\n\n{section.markdown}" for section in sections(document)]
    parts.append(f"## {ANSWERS}\n\n{ABOUT_ANSWERS}\n")
    parts += [f"### {section.title}\n\n{section.markdown}" for section in answer_schemas(document)]
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


@cache
def page(get_document: Callable[[], dict[str, Any]]) -> str:
    """Return the reference as a web page without scripts and network access. Takes a second, once."""
    from markdown_it import MarkdownIt  # takes 0.1 s, and few read this page

    render = MarkdownIt("commonmark", {"html": False}).enable("table").render

    def folded(some: list[Section]) -> str:
        return "".join(
            f"<details><summary>{html.escape(one.title)}</summary>{render(one.markdown)}</details>" for one in some
        )

    document = get_document()
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>{TITLE}</title><style>{_STYLE}</style>"
    body = f'<h1>{TITLE}</h1>{render(_RULES)}<p><a href="/openapi.json">openapi.json</a></p>'
    body += folded(sections(document)) + f"<h2>{ANSWERS}</h2><p>{ABOUT_ANSWERS}</p>" + folded(answer_schemas(document))
    return f'<!doctype html><html lang="en">{head}{body}</html>'
