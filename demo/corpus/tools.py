"""Tool calls in the form of the public RWKV-7 G1 weights.

A `System:` round lists the tools. The call is a fenced JSON block. A `User: Function output:` round holds its result.
The names of functions and parameters vary, so the model must copy them from the listing.
"""

from __future__ import annotations

import json
import operator
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from demo.corpus.chat import THINKS, small_talk
from demo.corpus.documents import Document, held_out, rounds
from demo.corpus.grammar import expand, pick, render

FENCE = "```json"
ONLY_CALLS = "Return only a JSON function call."
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
Values = dict[str, Any]
Tool = dict[str, Any]
"""A tool of `tools.toml`: names, about, asked, told, result and parameters."""


@cache
def tools() -> tuple[Tool, ...]:
    """Read `tools.toml`."""
    return tuple(tomllib.loads((Path(__file__).parent / "tools.toml").read_text(encoding="utf-8"))["tool"])


@dataclass(frozen=True, slots=True)
class Listed:
    """A tool with the names that one document uses. `signature` and `about` are parts of its line."""

    tool: Tool
    name: str
    parameters: tuple[str, ...]
    signature: tuple[str, ...]
    about: str

    @property
    def line(self) -> str:
        """The line of the listing: `- get_weather(city: string) // Get the weather of a city.`."""
        return f"- {self.name}({', '.join(self.signature)}){self.about}"

    def call(self, values: Values) -> str:
        """Return the call as JSON."""
        arguments = dict(zip(self.parameters, values.values(), strict=True))
        return json.dumps({"name": self.name, "arguments": arguments}, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Request:
    """A user's line, the call that answers it, the result as JSON and the result in words."""

    asked: str
    call: str
    result: str
    told: str


def _typed(text: str) -> int | str:
    return int(text) if text.lstrip("-").isdecimal() else text


def _values(rng: Random, tool: Tool) -> Values:
    """Sample the arguments by the parameters' first names."""
    return {one["names"][0]: _typed(render(rng, one["value"])["en"]) for one in tool["parameters"]}


def _result(rng: Random, tool: Tool, values: Values) -> Values:
    """Sample or compute the result; `a + b` is computed."""
    found: Values = {}
    for name, value in tool["result"].items():
        if isinstance(value, str) and len(parts := value.split(" ")) == 3:
            found[name] = OPERATORS[parts[1]](values[parts[0]], values[parts[2]])
        else:
            found[name] = _typed(render(rng, value)["en"]) if isinstance(value, str) else value
    return found


def _listed(rng: Random, tool: Tool) -> Listed:
    """Sample the names of a tool; the first name is more frequent."""

    def named(names: list[str]) -> str:
        return names[0] if rng.random() < 0.4 else pick(rng, names)

    parameters = tuple(named(one["names"]) for one in tool["parameters"])
    signature = []
    for given, parameter in zip(parameters, tool["parameters"], strict=True):
        mark = "?" if rng.random() < 0.12 else ""
        kind = pick(rng, ("number", "integer")) if parameter["type"] in ("number", "integer") else parameter["type"]
        noun = f"{pick(rng, ('The', 'A', 'Name of the'))} {given.replace('_', ' ')}"
        signature.append(f"{given}{mark}: {kind}" + (f" /* {noun} */" if rng.random() < 0.12 else ""))
    about = f" // {pick(rng, tool['about'])}" if rng.random() < 0.5 else ""
    return Listed(tool, named(tool["names"]), parameters, tuple(signature), about)


def listing(rng: Random, count: int) -> list[Listed]:
    """Sample up to `count` tools with different names."""
    found: dict[str, Listed] = {}
    for tool in rng.sample(tools(), count):
        one = _listed(rng, tool)
        found.setdefault(one.name, one)
    return list(found.values())


def request(rng: Random, listed: list[Listed], *, held: bool = False) -> Request | None:
    """Sample a request for one of the tools, or None if it is on the other side of the split."""
    chosen = pick(rng, listed)
    values = _values(rng, chosen.tool)
    if held_out(f"{chosen.tool['names'][0]} {sorted(values.items())}") != held:
        return None
    result = _result(rng, chosen.tool, values)
    told = pick(rng, chosen.tool["told"]).format(**values, **result)
    return Request(pick(rng, chosen.tool["asked"]).format(**values), chosen.call(values), json.dumps(result), told)


def held_request(rng: Random) -> tuple[list[Listed], Request]:
    """Sample one to four tools and a held-out request for one of them."""
    while True:
        listed = listing(rng, rng.randint(1, 4))
        if found := request(rng, listed, held=True):
            return listed, found


def trained_request(rng: Random, listed: list[Listed]) -> Request:
    """Sample a request of the training side."""
    while True:
        if found := request(rng, listed):
            return found


def system(listed: list[Listed], instruction: str = "") -> str:
    """Return the round that lists the tools."""
    first = f"{instruction}\n" if instruction else ""
    return f"System: {first}Tools:\n" + "\n".join(tool.line for tool in listed) + f"\n{ONLY_CALLS}"


def fenced(call: str) -> str:
    """Return what follows the opening fence of a call."""
    return f"\n{call}\n```"


def document(rng: Random) -> Document:
    """Sample one to three requests with the same tools, some results in words and some small talk."""
    listed = listing(rng, rng.randint(1, 5))
    begin = system(listed, expand(rng, "system")["en"] if rng.random() < 0.2 else "") + "\n\n"
    forced = rng.random() < 0.4
    opening, rest = pick(rng, THINKS) if rng.random() < 0.5 else ("", " ")
    turns: list[tuple[str, str]] = []
    for _ in range(rng.randint(1, 3)):
        if not forced and rng.random() < 0.2:
            turn = small_talk(rng, chinese=rng.random() < 0.2)
            turns.append((f"User: {turn.user}\n\nAssistant:{opening}", f"{rest}{turn.answer}"))
            continue
        one = trained_request(rng, listed)
        head, before = (f" {FENCE}", "") if forced else (opening, rest + FENCE)
        turns.append((f"User: {one.asked}\n\nAssistant:{head}", before + fenced(one.call)))
        if rng.random() < 0.6:
            output = f"User: Function output:\n{one.result}\n\nAssistant:{opening}"
            turns.append((output, f"{rest}{one.told}"))
    turns[0] = (begin + turns[0][0], turns[0][1])
    return rounds(turns)
