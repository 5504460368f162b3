"""Input and output of the `chat` command: a terminal with editing and Markdown, or a pipe."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter, WordCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import ANSI
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings
from prompt_toolkit.key_binding.key_processor import KeyPressEvent
from prompt_toolkit.patch_stdout import patch_stdout
from rich.console import Console as Screen
from rich.live import Live
from rich.markdown import Markdown

_PROMPT = ANSI("\x1b[32m> \x1b[0m")
_MORE = "\\"
"""At the end of a line: the message continues on the next one."""
_FENCE = "```"
_REFRESHES_PER_S = 10

ReadLine = Callable[[], Awaitable[str]]
"""Reads the next message. Raises EOFError at the end, KeyboardInterrupt if it is discarded."""

_CONTROLS = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"} | {
    ord("\r"): None
}


def printable(text: str) -> str:
    """Returns a text without terminal escape sequences.

    A model may write sequences that move the cursor, change the title or fill the clipboard. The conversation keeps
    them.
    """
    return text.translate(_CONTROLS)


class Output(Protocol):
    """Shows a streamed answer."""

    def write(self, text: str) -> None:
        """Shows the next piece."""

    def end(self) -> None:
        """Ends the answer, also an interrupted one."""


class PlainOutput:
    """An Output: writes each piece to standard output."""

    def write(self, text: str) -> None:
        sys.stdout.write(printable(text))
        sys.stdout.flush()

    def end(self) -> None:
        sys.stdout.write("\n")


class MarkdownOutput:
    """An Output: renders Markdown on a terminal, block after block.

    Only the last block is drawn again while it grows. Finished blocks stay as they are.
    """

    def __init__(self, screen: Screen | None = None) -> None:
        self._screen = screen or Screen()
        self._live: Live | None = None
        self._block = ""

    def write(self, text: str) -> None:
        self._block += printable(text)
        finished, self._block = split_blocks(self._block)
        if finished:
            self._stop()
            self._screen.print(Markdown(finished), "", sep="")
        if self._live is None:
            self._live = Live(console=self._screen, refresh_per_second=_REFRESHES_PER_S, transient=True)
            self._live.start()
        self._live.update(Markdown(self._block))

    def end(self) -> None:
        self._stop()
        self._screen.print(Markdown(self._block))
        self._block = ""

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def split_blocks(text: str) -> tuple[str, str]:
    """Splits Markdown after the last blank line outside fenced code: (finished blocks, the growing one)."""
    at, is_code, begin = 0, False, 0
    for line in text.splitlines(keepends=True):
        begin += len(line)
        if line.lstrip().startswith(_FENCE):
            is_code = not is_code
        if not line.strip() and line.endswith("\n") and not is_code:
            at = begin
    return text[:at], text[at:]


def open_terminal(history: str, words: Mapping[str, tuple[str, ...]]) -> tuple[ReadLine, Output]:
    """Returns the reader of messages and the output.

    words: command -> values to complete
    """
    output = MarkdownOutput() if sys.stdout.isatty() else PlainOutput()
    if sys.stdin.isatty():
        sys.stdout.write("/help lists the commands; Ctrl-D leaves\n")
        return _terminal_reader(history, words), output
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # an invalid byte must not end the conversation
    return lambda: _joined(_read_pipe), output


def _terminal_reader(history: str, words: Mapping[str, tuple[str, ...]]) -> ReadLine:
    session: PromptSession[str] = PromptSession(
        history=open_history(history), completer=CommandCompleter(words), key_bindings=_keys()
    )

    async def read_line() -> str:
        with patch_stdout():
            return str(await session.prompt_async(_PROMPT))

    return lambda: _joined(read_line)


class CommandCompleter(Completer):
    """Completes commands, then their values or files."""

    def __init__(self, words: Mapping[str, tuple[str, ...]]) -> None:
        self._names = WordCompleter(list(words), sentence=True)
        self._values: dict[str, Completer] = {
            name: WordCompleter(list(values), sentence=True) for name, values in words.items()
        }
        self._values |= dict.fromkeys(("/load", "/save"), PathCompleter(expanduser=True))

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        name, space, value = document.text_before_cursor.partition(" ")
        if not space:
            return self._names.get_completions(document, complete_event)
        found = self._values.get(name)
        return found.get_completions(Document(value), complete_event) if found else ()


def _keys() -> KeyBindings:
    """Alt+Enter begins a new line of the message."""
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def open_history(path: str) -> History:
    """Opens the history file. If it is unusable, keeps the history in memory."""
    file = Path(path).expanduser()
    try:
        with file.open("ab"):
            pass
        return FileHistory(str(file))
    except OSError as error:
        sys.stderr.write(f"the history is not saved: {file} cannot be written ({error.strerror}); see --history\n")
        return InMemoryHistory()


async def _joined(read_line: ReadLine) -> str:
    """Reads lines until one does not end in a backslash."""
    lines = [await read_line()]
    while lines[-1].endswith(_MORE):
        lines[-1] = lines[-1].removesuffix(_MORE)
        lines.append(await read_line())
    return "\n".join(lines)


async def _read_pipe() -> str:
    line = await asyncio.to_thread(sys.stdin.readline)
    if not line:
        raise EOFError
    return str(line).rstrip("\n")
