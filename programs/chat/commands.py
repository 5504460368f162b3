"""The slash commands."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from programs.chat.conversation import ConsoleError, Conversation, Piece, as_value
from routes.request.bodies import PromptBody
from routes.request.fields import ChatOnlyFields
from routes.request.json_body import validate
from rwkv_batch.errors import ServiceError

SYSTEM = "system"
"""Setting of the system prompt, which is not a body field."""
_MODEL = "model"
_WITH_USAGE = {"include_usage": True}
_RESERVED_FIELDS = frozenset("contents messages prefix suffix stream stream_options session_id password model".split())
SETTABLE = tuple(sorted({*PromptBody.model_fields, SYSTEM} - _RESERVED_FIELDS - frozenset(ChatOnlyFields.model_fields)))
"""Names that /set takes."""


@dataclass(slots=True)
class Stats:
    """Tokens and times of the last answer and of all."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    started_at: float = 0.0
    first_at: float | None = None
    ended_at: float = 0.0

    def begin(self) -> None:
        """Call before an answer."""
        self.prompt_tokens = self.completion_tokens = 0
        self.started_at, self.first_at = time.monotonic(), None

    def count(self, piece: Piece) -> None:
        self.first_at = self.first_at or time.monotonic()
        self.prompt_tokens += piece.prompt_tokens
        self.completion_tokens += piece.completion_tokens
        self.total_tokens += piece.prompt_tokens + piece.completion_tokens

    def end(self) -> None:
        self.ended_at = time.monotonic()

    def __str__(self) -> str:
        if self.first_at is None:
            return "no answer yet"
        seconds = self.ended_at - self.first_at
        speed = f", {(self.completion_tokens - 1) / seconds:.0f} tokens/s" if self.completion_tokens > 1 else ""
        return (
            f"last answer: {self.prompt_tokens} prompt tokens, {self.completion_tokens} generated, "
            f"first after {self.first_at - self.started_at:.2f} s{speed}; all: {self.total_tokens} tokens"
        )


@dataclass(slots=True)
class Console:
    """A conversation and its sampling settings."""

    conversation: Conversation = field(default_factory=Conversation)
    settings: dict[str, Any] = field(default_factory=dict)
    """Body fields, and `system`."""
    models: tuple[str, ...] = ()
    """names that `model` may have; (): unknown"""
    stats: Stats = field(default_factory=Stats)
    is_done: bool = False

    def body(self) -> dict[str, Any]:
        """Returns the request body: the branch's messages and the settings."""
        settings = {name: value for name, value in self.settings.items() if name != SYSTEM}
        system = self.settings.get(SYSTEM)
        before = [{"role": SYSTEM, "content": system}] if system else []
        messages = [*before, *self.conversation.messages]
        return {"messages": messages, "stream": True, "stream_options": _WITH_USAGE, "chunk_size": 1, **settings}

    def handle_command(self, line: str) -> str:
        """Executes a slash command and returns its output. Raises ConsoleError."""
        name, _, rest = line[1:].strip().partition(" ")
        if name not in _COMMANDS:
            raise ConsoleError(f"there is no /{name}; /help lists the commands")
        return _COMMANDS[name][0](self, rest.strip())

    def set(self, name: str, value: Any) -> None:
        """Changes a setting. None resets it to the default. Raises ConsoleError."""
        if name not in (*SETTABLE, _MODEL):
            near = get_close_matches(name, SETTABLE)
            known = f"did you mean {' or '.join(near)}?" if near else f"the names are {', '.join(SETTABLE)}"
            raise ConsoleError(f"there is no setting {name!r}; {known}")
        if name == SYSTEM and not isinstance(value, str | None):
            value = str(value)
        changed = {**self.settings, name: value}
        fields = {key: one for key, one in changed.items() if key != SYSTEM}
        try:
            validate(PromptBody, {"contents": ["x"], **fields})
        except ServiceError as error:
            raise ConsoleError(str(error)) from None
        self.settings = {key: one for key, one in changed.items() if one is not None}


def _help(console: Console, rest: str) -> str:
    return "\n".join(f"/{name:<7} {text}" for name, (_, text) in _COMMANDS.items())


def _branch(console: Console, rest: str) -> str:
    conversation = console.conversation
    if not rest:
        marks = (("*" if name == conversation.branch else " ", name) for name in conversation.branches)
        return "\n".join(f"{mark} {name} ({len(conversation.branches[name])} messages)" for mark, name in marks)
    is_new = conversation.switch_branch(rest)
    return f"on the {'new ' if is_new else ''}branch {rest}"


def _undo(console: Console, rest: str) -> str:
    if rest and not rest.isdecimal():
        raise ConsoleError(f"/undo takes a number of turns, got {rest!r}")
    removed = console.conversation.undo(int(rest or 1))
    return f"{removed} turn{'s' * (removed != 1)} removed"


def _save(console: Console, rest: str) -> str:
    if not rest:
        raise ConsoleError("/save needs a file name: /save FILE")
    console.conversation.save(rest, console.settings)
    return f"saved to {rest}"


def _load(console: Console, rest: str) -> str:
    if not rest:
        raise ConsoleError("/load needs a file name: /load FILE")
    conversation, loaded = Conversation(), Console()
    for name, value in conversation.load(rest).items():
        loaded.set(name, value)
    console.conversation, console.settings = conversation, loaded.settings
    return f"on the branch {conversation.branch}, {len(conversation.messages)} messages"


def _reset(console: Console, rest: str) -> str:
    console.conversation.reset()
    return "forgotten"


def _set(console: Console, rest: str) -> str:
    name, _, value = rest.partition(" ")
    if not name:
        return "\n".join(f"{key} {one}" for key, one in sorted(console.settings.items())) or "all as by default"
    console.set(name, as_value(value.strip()) if value.strip() else None)
    return f"{name} is {console.settings.get(name, 'as by default')}"


def _model(console: Console, rest: str) -> str:
    if rest and console.models and rest not in console.models:
        raise ConsoleError(f"there is no model {rest!r}, only {', '.join(console.models)}")
    if rest:
        console.set(_MODEL, rest)
    used = console.settings.get(_MODEL) or (console.models[0] if console.models else "")
    return "\n".join(f"{'*' if name == used else ' '} {name}" for name in console.models or (used,))


def _state(console: Console, rest: str) -> str:
    return _set(console, f"state {rest}")


def _stats(console: Console, rest: str) -> str:
    return str(console.stats)


def _quit(console: Console, rest: str) -> str:
    console.is_done = True
    return ""


_COMMANDS: dict[str, tuple[Callable[[Console, str], str], str]] = {
    "branch": (_branch, "[NAME]: a copy of the conversation, or an earlier branch; without NAME: list"),
    "undo": (_undo, "[N]: remove the last N turns"),
    "save": (_save, "FILE: all branches and settings"),
    "load": (_load, "FILE: branches and settings that /save wrote"),
    "reset": (_reset, "forget the conversation"),
    "set": (_set, "NAME VALUE: as temperature 0.5; without VALUE: the default; alone: list"),
    "model": (_model, "[NAME]: use another model; without NAME: list"),
    "state": (_state, "[NAME]: start from a tuned state; without NAME: from none"),
    "stats": (_stats, "tokens and speed of the last answer"),
    "help": (_help, "this"),
    "quit": (_quit, "leave; so does Ctrl-D"),
}
"""Name -> function and help."""
NAMES = tuple(f"/{name}" for name in _COMMANDS)
