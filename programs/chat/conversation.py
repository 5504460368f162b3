"""A conversation with branches, as plain data. A request sends the messages of one branch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

MAIN = "main"


class ConsoleError(Exception):
    """A command failed. The message says why."""


class Piece(NamedTuple):
    """A part of an answer."""

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """both in the last piece"""


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str


class Saved(msgspec.Struct, kw_only=True):
    branch: str
    branches: dict[str, list[Message]]
    settings: dict[str, Any] = {}


class Conversation:
    """Branches of messages in OpenAI's form. One branch is active."""

    def __init__(self) -> None:
        self.branch = MAIN
        self.branches: dict[str, list[dict[str, str]]] = {MAIN: []}

    @property
    def messages(self) -> list[dict[str, str]]:
        """Messages of the active branch."""
        return self.branches[self.branch]

    def say(self, role: str, text: str) -> None:
        self.messages.append({"role": role, "content": text})

    def undo(self, turns: int = 1) -> int:
        """Removes the last turns (question and answer) and returns their number. The system prompt stays."""
        done = 0
        while done < turns and any(message["role"] == "user" for message in self.messages):
            while self.messages.pop()["role"] != "user":
                pass
            done += 1
        return done

    def switch_branch(self, name: str) -> bool:
        """Switches to a branch. A new one starts as a copy. Returns whether it is new."""
        is_new = name not in self.branches
        if is_new:
            self.branches[name] = [dict(message) for message in self.messages]
        self.branch = name
        return is_new

    def reset(self) -> None:
        """Removes all branches."""
        self.__init__()  # type: ignore[misc]

    def save(self, path: str, settings: dict[str, Any]) -> None:
        """Writes the conversation to a file. Raises ConsoleError."""
        branches = {name: msgspec.convert(messages, list[Message]) for name, messages in self.branches.items()}
        content = msgspec.json.encode(Saved(branch=self.branch, branches=branches, settings=settings))
        try:
            Path(path).write_bytes(msgspec.json.format(content) + b"\n")
        except OSError as error:
            raise ConsoleError(f"{path} cannot be written: {error.strerror}") from None

    def load(self, path: str) -> dict[str, Any]:
        """Reads a conversation and returns its settings. Raises ConsoleError and changes nothing on failure."""
        try:
            saved = msgspec.json.decode(Path(path).read_bytes(), type=Saved)
        except OSError as error:
            raise ConsoleError(f"{path} cannot be read: {error.strerror}") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConsoleError(f"{path} is not a conversation ({error}); give a file that /save wrote") from None
        if saved.branch not in saved.branches:
            raise ConsoleError(f"{path} names the branch {saved.branch!r}, which it does not contain")
        self.branch, self.branches = saved.branch, msgspec.to_builtins(saved.branches)
        return saved.settings


def as_value(text: str) -> Any:
    """Parses a typed value: JSON if possible, otherwise text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
