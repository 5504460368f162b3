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
from random import Random
from typing import Any

from demo.corpus.chat import THINKS, small_talk
from demo.corpus.documents import Document, dialogue, held_out, rounds
from demo.corpus.grammar import expand, pick, render
from demo.corpus.words import ROOT

FENCE = "```json"
ONLY_CALLS = "Return only a JSON function call."
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
Values = dict[str, Any]
Tool = dict[str, Any]
"""A tool of `tools.toml`: names, about, asked, told, result and parameters."""


@cache
def tools() -> tuple[Tool, ...]:
    return tuple(tomllib.loads((ROOT / "tools.toml").read_text(encoding="utf-8"))["tool"])


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
        arguments = dict(zip(self.parameters, values.values(), strict=True))
        return json.dumps({"name": self.name, "arguments": arguments}, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Request:
    """A user's line and the call that answers it. Also the result, as JSON and in words."""

    asked: str
    call: str
    result: str
    told: str


def _sampled(rng: Random, value: Any, values: Values | None = None) -> Any:
    """Return a constant, a sampled template or an operation's result.

    An operation is `a + b`, for example. Digits become an integer.
    """
    if not isinstance(value, str):
        return value
    if values and value.split(" ")[1:2] and value.split(" ")[1] in OPERATORS:
        one, sign, other = value.split(" ")
        return OPERATORS[sign](values[one], values[other])
    text = str(render(rng, value)["en"])
    return int(text) if text.lstrip("-").isdecimal() else text


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


def request(rng: Random, given: list[Listed] | None = None, *, held: bool = False) -> tuple[list[Listed], Request]:
    """Sample a request for a tool, on one side of the split.

    The tool is one of `given`. Without `given` it is one of one to four other tools.
    """
    while True:
        listed = given or listing(rng, rng.randint(1, 4))
        chosen = pick(rng, listed)
        tool = chosen.tool
        values = {one["names"][0]: _sampled(rng, one["value"]) for one in tool["parameters"]}
        if held_out(f"{tool['names'][0]} {sorted(values.items())}") == held:
            result = {name: _sampled(rng, value, values) for name, value in tool["result"].items()}
            asked, told = (pick(rng, tool[lines]).format(**values, **result) for lines in ("asked", "told"))
            return listed, Request(asked, chosen.call(values), json.dumps(result), told)


def system(listed: list[Listed], instruction: str = "") -> str:
    first = f"{instruction}\n" if instruction else ""
    return f"System: {first}Tools:\n" + "\n".join(tool.line for tool in listed) + f"\n{ONLY_CALLS}"


def fenced(call: str) -> str:
    """Return what follows the opening fence of a call."""
    return f"\n{call}\n```"


def document(rng: Random) -> Document:
    """Sample one to three requests with the same tools. Adds some results in words and some small talk."""
    listed = listing(rng, rng.randint(1, 5))
    first = system(listed, expand(rng, "system")["en"] if rng.random() < 0.2 else "")
    forced = rng.random() < 0.4
    think = pick(rng, THINKS) if rng.random() < 0.5 else None
    turns: list[tuple[str, str]] = []
    for _ in range(rng.randint(1, 3)):
        if not forced and rng.random() < 0.2:
            turn = small_talk(rng, chinese=rng.random() < 0.2)
            turns += dialogue([(turn.user, turn.answer)], think)
            continue
        _, one = request(rng, listed)
        if forced:
            turns.append((f"User: {one.asked}\n\nAssistant: {FENCE}", fenced(one.call)))
        else:
            turns += dialogue([(one.asked, FENCE + fenced(one.call))], think)
        if rng.random() < 0.6:
            turns += dialogue([(f"Function output:\n{one.result}", one.told)], think)
    return rounds([(f"{first}\n\n{turns[0][0]}", turns[0][1]), *turns[1:]])
