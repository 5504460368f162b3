"""The loop of the `chat` command."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import os
import signal
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import NoReturn

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.patch_stdout import patch_stdout

from programs.backends.local_engine import LocalEngine
from programs.batch.options import check_settings
from programs.chat.answer_sources import AnswerSource, LocalAnswers, RemoteAnswers
from programs.chat.commands import NAMES, Console
from programs.chat.conversation import ConsoleError, printable
from programs.record import RunError
from programs.settings import SettingsError, parse_settings, program
from programs.settings.model_file import with_default_model
from rwkv_batch.errors import StartupError
from rwkv_batch.ipc.process import LogConfig, set_up_logging

OK, CANNOT_RUN, BAD_FLAG, INTERRUPTED = 0, 1, 2, 130
_HISTORY = "~/.rwkv_chat_history"
_PROMPT = "> "

ReadLine = Callable[[], Awaitable[str]]
"""Reads the next line. Raises EOFError at the end, KeyboardInterrupt if the line is discarded."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{message}; see {program('chat')} --help")


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of `chat`. Other flags are the service's."""
    parser = _Parser(
        prog=program("chat"),
        allow_abbrev=False,
        description="Talk to the model on a terminal; /help there lists the commands. Flags of the engine "
        "(--model-path, --pp-devices, --dtype ...) are the service's.",
    )
    parser.add_argument("--url", default="", help="running service to use instead of an engine in this process")
    parser.add_argument("--load", default="", metavar="FILE", help="conversation file written by /save")
    parser.add_argument("--set", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), help="as /set does")
    parser.add_argument("--history", default=_HISTORY, help=f"history file of the typed lines; default: {_HISTORY}")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns the exit code."""
    try:
        given, rest = build_parser().parse_known_args(list(arguments))
        settings = parse_settings(rest, os.environ)
        check_settings(given.url, rest)
        set_up_logging("chat", LogConfig(settings.service.log_format, "warning"))
        console = Console()
        for name, value in given.set:
            console.handle_command(f"/set {name} {value}")
        if given.load:
            console.handle_command(f"/load {given.load}")
        answers: AnswerSource = (
            RemoteAnswers(given.url, settings.http.password)
            if given.url
            else LocalAnswers(LocalEngine(with_default_model(settings)))
        )
        asyncio.run(_chat_loop(console, answers, _line_reader(given.history)))
    except SettingsError as error:
        sys.stderr.write(f"error: {error}\n")
        return BAD_FLAG
    except (RunError, StartupError, ConsoleError) as error:
        sys.stderr.write(f"error: {error}\n")
        return CANNOT_RUN
    except KeyboardInterrupt:  # while loading the model or reading a pipe
        sys.stderr.write("\n")
        return INTERRUPTED
    return OK


def _line_reader(history: str) -> ReadLine:
    """Returns a reader of terminal lines or of a pipe. A terminal has editing and history."""
    if not sys.stdin.isatty():
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")  # an invalid byte must not end the conversation
        return _read_pipe
    completer = WordCompleter(NAMES, sentence=True)
    session: PromptSession[str] = PromptSession(history=open_history(history), completer=completer)

    async def read_line() -> str:
        with patch_stdout():
            return str(await session.prompt_async(_PROMPT))

    return read_line


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


async def _read_pipe() -> str:
    line = await asyncio.to_thread(sys.stdin.readline)
    if not line:
        raise EOFError
    return str(line).rstrip("\n")


async def _chat_loop(console: Console, answers: AnswerSource, read_line: ReadLine) -> None:
    """Runs the conversation until the user leaves. Raises RunError or ConsoleError without a backend."""
    await answers.open()
    try:
        while not console.is_done:
            try:
                line = (await read_line()).strip()
            except KeyboardInterrupt:
                continue
            except EOFError:
                return
            await _handle_line(console, answers, line)
    finally:
        await answers.close()


async def _handle_line(console: Console, answers: AnswerSource, line: str) -> None:
    """Handles one line: a command or a message."""
    try:
        if line.startswith("/"):
            output = console.handle_command(line)
            sys.stdout.write(output + "\n" if output else "")
        elif line:
            await _answer(console, answers, line)
    except ConsoleError as error:
        sys.stdout.write(f"error: {printable(str(error))}\n")
    sys.stdout.flush()


async def _answer(console: Console, answers: AnswerSource, line: str) -> None:
    """Sends a message and prints the streamed answer. Ctrl-C stops it and keeps the partial answer."""
    console.conversation.say("user", line)
    pieces: list[str] = []
    writing = asyncio.ensure_future(_write(answers.stream(console.body()), pieces))
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, writing.cancel)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await writing
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        if pieces:
            console.conversation.say("assistant", "".join(pieces))
            sys.stdout.write("\n")
        else:
            console.conversation.undo()  # there is no answer to it


async def _write(texts: AsyncGenerator[str, None], pieces: list[str]) -> None:
    async with contextlib.aclosing(texts):
        async for text in texts:
            pieces.append(text)
            sys.stdout.write(printable(text))
            sys.stdout.flush()
