"""The loop of the `chat` command."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncGenerator, Sequence

from programs.batch.options import check_settings
from programs.chat.answer_sources import AnswerSource, RemoteAnswers
from programs.chat.commands import NAMES, SETTABLE, Console
from programs.chat.conversation import ConsoleError, Piece
from programs.chat.options import build_parser
from programs.chat.terminal import Output, ReadLine, open_terminal, printable
from programs.record import RunError
from programs.settings import Settings, parse_settings, reports_errors
from programs.settings.model_file import with_default_model
from rwkv_batch.errors import StartupError
from rwkv_batch.ipc.process import LogConfig, set_up_logging

OK, LINE_FAILED, INTERRUPTED = 0, 1, 130


@reports_errors(RunError, StartupError, ConsoleError)
def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns the exit code."""
    try:
        given, rest = build_parser().parse(arguments)
        settings = parse_settings(rest, os.environ)
        check_settings(given.url, rest)
        set_up_logging("chat", LogConfig(settings.service.log_format, "warning"))
        console = Console()
        for name, value in given.set:
            console.handle_command(f"/set {name} {value}")
        if given.load:
            console.handle_command(f"/load {given.load}")
        is_well = asyncio.run(_chat(console, _answer_source(given.url, settings), given.history))
    except KeyboardInterrupt:  # while loading the model or reading a pipe
        sys.stderr.write("\n")
        return INTERRUPTED
    return OK if is_well or sys.stdin.isatty() else LINE_FAILED


def _answer_source(url: str, settings: Settings) -> AnswerSource:
    if url:
        return RemoteAnswers(url, settings.http.password)
    from programs.chat.local_answers import LocalAnswers

    return LocalAnswers(with_default_model(settings))


async def _chat(console: Console, answers: AnswerSource, history: str) -> bool:
    """Runs the command. Returns whether no line failed. Raises RunError or ConsoleError without a backend."""
    await answers.open()
    try:
        console.models = await answers.models()
        words = {**dict.fromkeys(NAMES, ()), "/set": SETTABLE, "/model": console.models}
        return await chat_loop(console, answers, *open_terminal(history, words))
    finally:
        await answers.close()


async def chat_loop(console: Console, answers: AnswerSource, read_line: ReadLine, output: Output) -> bool:
    """Runs the conversation until the user leaves. Returns whether no line failed."""
    is_well = True
    while not console.is_done:
        try:
            line = (await read_line()).strip()
        except KeyboardInterrupt:
            continue
        except EOFError:
            break
        is_well &= await _handle_line(console, answers, line, output)
    return is_well


async def _handle_line(console: Console, answers: AnswerSource, line: str, output: Output) -> bool:
    """Handles one line: a command or a message. Returns whether it succeeded."""
    try:
        if line.startswith("/"):
            said = console.handle_command(line)
            sys.stdout.write(said + "\n" if said else "")
        elif line:
            await _answer(console, answers, line, output)
    except ConsoleError as error:
        sys.stdout.write(f"error: {printable(str(error))}\n")
        return False
    finally:
        sys.stdout.flush()
    return True


async def _answer(console: Console, answers: AnswerSource, line: str, output: Output) -> None:
    """Sends a message and prints the streamed answer. Ctrl-C stops it and keeps the partial answer."""
    console.conversation.say("user", line)
    console.stats.begin()
    texts: list[str] = []
    writing = asyncio.ensure_future(_write(answers.stream(console.body()), texts, console, output))
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, writing.cancel)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await writing
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        console.stats.end()
        if texts:
            output.end()
            console.conversation.say("assistant", "".join(texts))
        else:
            console.conversation.undo()  # there is no answer to it


async def _write(pieces: AsyncGenerator[Piece, None], texts: list[str], console: Console, output: Output) -> None:
    async with contextlib.aclosing(pieces):
        async for piece in pieces:
            console.stats.count(piece)
            if piece.text:
                texts.append(piece.text)
                output.write(piece.text)
