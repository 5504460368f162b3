"""The console: its commands alone, and conversations with a service and with its own engine."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, InMemoryHistory
from rich.console import Console as Screen

from app import main
from programs.chat.answer_sources import RemoteAnswers, pieces_of
from programs.chat.command import chat_loop
from programs.chat.commands import Console
from programs.chat.conversation import ConsoleError
from programs.chat.local_answers import LocalAnswers
from programs.chat.options import build_parser
from programs.chat.terminal import CommandCompleter, MarkdownOutput, PlainOutput, open_history, printable, split_blocks
from programs.settings import parse_settings
from programs.settings.model_file import with_default_model
from test.serving import ROOT, START_TIMEOUT_S, Service

pytestmark = pytest.mark.slow


def console_after(*turns: str) -> Console:
    console = Console()
    for turn in turns:
        console.conversation.say("user", turn)
        console.conversation.say("assistant", turn.upper())
    return console


def said(console: Console) -> list[str]:
    return [message["content"] for message in console.conversation.messages]


def test_branches_are_copies_to_return_to() -> None:
    console = console_after("a", "b")
    assert "new branch other" in console.handle_command("/branch other")
    assert console.handle_command("/undo") == "1 turn removed"
    console.conversation.say("user", "c")
    assert said(console) == ["a", "A", "c"]
    console.handle_command("/branch main")
    assert said(console) == ["a", "A", "b", "B"]
    assert console.handle_command("/branch") == "* main (4 messages)\n  other (3 messages)"
    assert console.handle_command("/undo 5") == "2 turns removed" and said(console) == []
    console.handle_command("/reset")
    assert console.handle_command("/branch") == "* main (0 messages)"


def test_save_and_load_keep_the_conversation(tmp_path: Path) -> None:
    console = console_after("a", "ü\n✿")
    console.handle_command("/set temperature 0.5")
    console.handle_command("/branch other")
    console.handle_command("/undo")
    console.handle_command(f"/save {tmp_path / 'talk.json'}")
    again = Console()
    again.handle_command(f"/load {tmp_path / 'talk.json'}")
    assert (again.conversation.branches, again.conversation.branch) == (
        console.conversation.branches,
        console.conversation.branch,
    )
    assert again.settings == {"temperature": 0.5}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"branch": "x", "branches": {}}',
        b'{"branch": "main", "branches": {"main": "no"}}',
        b'{"branch": "main", "branches": {"main": [{"content": "without a role"}]}}',
        b'{"branch": "main", "branches": {"main": [{"role": "user", "content": "\xff"}]}}',
        b"[" * 100_000,
    ],
)
def test_an_invalid_file_changes_nothing(tmp_path: Path, content: bytes) -> None:
    console = console_after("a")
    (tmp_path / "talk.json").write_bytes(content)
    with pytest.raises(ConsoleError, match=r"talk\.json"):
        console.handle_command(f"/load {tmp_path / 'talk.json'}")
    assert said(console) == ["a", "A"]


def test_settings_are_fields_of_the_body_within_their_limits() -> None:
    console = console_after("a")
    console.handle_command("/set temperature 0")
    console.handle_command("/set enable_think true")
    console.handle_command("/set system Be brief.")
    body = console.body()
    assert (body["temperature"], body["enable_think"], body["messages"][0]) == (
        0,
        True,
        {"role": "system", "content": "Be brief."},
    )
    for wrong in ("temperature -1", "temperature warm", "contents x", "nonsense 1", "max_tokens 0"):
        with pytest.raises(ConsoleError, match=wrong.split()[0]):
            console.handle_command(f"/set {wrong}")
    with pytest.raises(ConsoleError, match=r"no setting 'temprature'; did you mean temperature"):
        console.handle_command("/set temprature 0")
    assert console.handle_command("/set").splitlines() == ["enable_think True", "system Be brief.", "temperature 0"]
    console.handle_command("/set temperature")
    assert "temperature" not in console.body()
    for wrong in ("/nonsense", "/undo x", "/save", "/load", "/"):
        with pytest.raises(ConsoleError):
            console.handle_command(wrong)
    assert all(
        name in console.handle_command("/help") for name in ("/branch", "/undo", "/save", "/load", "/reset", "/set")
    )


def test_too_deeply_nested_values_are_text() -> None:
    with pytest.raises(ConsoleError, match="temperature"):
        Console().handle_command("/set temperature " + "[" * 100_000)


def test_control_sequences_are_not_printed() -> None:
    said = "a\x1b]52;c;cm0gLXJm\x07b\x9b2Jc\rd\te\n✿"
    shown = printable(said)
    assert not [one for one in shown if one != "\n" and one != "\t" and (ord(one) < 32 or 127 <= ord(one) < 160)]
    assert shown.startswith("a") and shown.endswith("cd\te\n✿")


def test_an_unwritable_history_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(open_history(str(tmp_path / "history")), FileHistory)
    assert isinstance(open_history(str(tmp_path / "absent" / "history")), InMemoryHistory)
    assert "--history" in capsys.readouterr().err


def test_an_answer_of_another_server_is_reported() -> None:
    for event in (
        b"data: {",
        b"data: []",
        b'data: {"choices": 1}',
        b'data: {"choices": [{"delta": null}]}',
        b"data: 1",
    ):
        with pytest.raises(ConsoleError, match="--url"):
            pieces_of(event)


def test_an_error_is_text_and_a_wrong_password_has_a_remedy() -> None:
    for error in (b'"x"', b'{"message": "x", "code": null}'):
        with pytest.raises(ConsoleError, match=r"^x$"):
            pieces_of(b'data: {"error": ' + error + b"}")

    async def refuse(_request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "Unauthorized: x"}}, status=401)

    with pytest.raises(ConsoleError, match=r"^Unauthorized: x; give the right --password$"):
        asyncio.run(first_piece(refuse))


async def first_piece(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> tuple[str, ...]:
    """Ask a service that answers every POST by `handler`. Returns its models."""
    service = web.Application()
    service.router.add_post("/{path:.*}", handler)
    service.router.add_get("/openai/v1/models", lambda _: web_models())
    async with TestServer(service) as server:
        answers = RemoteAnswers(str(server.make_url("")), "wrong")
        await answers.open()
        try:
            models = await answers.models()
            await anext(answers.stream({}), None)
        finally:
            await answers.close()
    return models


async def web_models() -> web.Response:
    return web.json_response({"data": [{"id": "a,b"}, {"id": "c"}]})


def test_a_service_that_sends_nothing_is_not_awaited_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy's error page is no message, and a comma in a model's name separates nothing."""

    async def hang(_request: web.Request) -> web.Response:
        await asyncio.sleep(20)
        return web.Response()

    async def page(_request: web.Request) -> web.Response:
        return web.Response(text="<html>Bad Gateway</html>", status=502)

    async def nothing(_request: web.Request) -> web.Response:
        return web.Response()

    assert RemoteAnswers.read_timeout_s == 60.0
    monkeypatch.setattr(RemoteAnswers, "read_timeout_s", 0.2)
    with pytest.raises(ConsoleError, match=r"no answer from .*Timeout.*check --url, and that it is running"):
        asyncio.run(first_piece(hang))
    with pytest.raises(ConsoleError, match=r"^status 502$"):
        asyncio.run(first_piece(page))
    assert asyncio.run(first_piece(nothing)) == ("a,b", "c")


def chat(service: Service, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "app.py"), "chat", "--url", service.url, "--set", "max_tokens", "2", *flags]
    return subprocess.Popen(command, cwd=ROOT, stdin=-1, stdout=-1, stderr=-1, text=True)


def test_a_conversation_through_a_pipe(fake: Service, tmp_path: Path) -> None:
    """The fake engine repeats the user's last message once per token."""
    talk = tmp_path / "talk.json"
    lines = [
        "H\udcffi",
        "/undo",
        "/undo",
        "Hi",
        "/undo",
        "Ho",
        "/set temperature -1",
        "break it",
        f"/save {talk}",
        "/quit",
        "never said",
    ]
    process = chat(fake)
    assert process.stdin is not None
    process.stdin.reconfigure(errors="surrogateescape")  # type: ignore[attr-defined]  # the first line is no UTF-8
    output, errors = process.communicate("\n".join(lines) + "\n", timeout=START_TIMEOUT_S)
    assert (process.returncode, errors) == (1, ""), "two lines failed"
    reported = output.splitlines()[3:]
    assert reported[:3] == ["HiHi", "1 turn removed", "HoHo"]
    assert "temperature" in reported[3] and any("broken on demand" in line for line in reported[4:6])
    assert "never said" not in output
    assert [one["content"] for one in json.loads(talk.read_text())["branches"]["main"]][:2] == ["Ho", "HoHo"]


def test_an_answer_can_be_interrupted_and_the_conversation_continues(fake: Service) -> None:
    process = chat(fake, "--set", "max_tokens", "1000000")
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("endless\n")
    process.stdin.flush()
    assert process.stdout.read(7) == "endless"
    process.send_signal(signal.SIGINT)
    process.stdin.write("/branch\n")
    process.stdin.flush()
    output, _ = process.communicate(timeout=START_TIMEOUT_S)
    assert process.returncode == 0 and output.rstrip().endswith("* main (2 messages)")
    fake.wait_idle()


def test_an_unreachable_service_is_reported(fake: Service) -> None:
    command = [sys.executable, str(ROOT / "app.py"), "chat", "--url", "127.0.0.1:1"]
    ran = subprocess.run(command, cwd=ROOT, input="Hi\n", capture_output=True, text=True, timeout=START_TIMEOUT_S)
    assert ran.returncode == 1, "a script must notice"
    assert "no answer from http://127.0.0.1:1/" in ran.stdout and "check --url" in ran.stdout
    wrong = subprocess.run([*command, "--nonsense"], cwd=ROOT, capture_output=True, text=True, timeout=START_TIMEOUT_S)
    assert wrong.returncode == 2 and "--nonsense" in wrong.stderr


def test_it_can_be_interrupted_while_the_model_loads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def opened(_answers: RemoteAnswers) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(20)

    monkeypatch.setattr(RemoteAnswers, "open", opened)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    try:
        assert main(["chat", "--url", "http://127.0.0.1:1"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert "Traceback" not in capsys.readouterr().err


def test_engine_flags_are_rejected_with_url(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--model-path", "m.pth"], ["--dtype=fp32"], ["--log-level", "debug", "--max-running", "4"]):
        assert main(["chat", "--url", "http://127.0.0.1:1", *flags]) == 2
        named = next(flag.partition("=")[0] for flag in flags if flag.startswith("--") and flag != "--log-level")
        assert f"{named} is a setting of an engine in this process, but --url" in capsys.readouterr().err


def test_with_an_engine_of_its_own(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = iter(["Hi", "And now?", "/set max_tokens 0"])
    console = Console()
    console.handle_command("/set ignore_eos true")
    console.handle_command("/set stop_tokens []")

    async def ask() -> str:
        for line in lines:
            return line
        raise EOFError

    defaults = tmp_path / "generation_config.json"
    defaults.write_text('{"max_new_tokens": 5}')
    flags = ["--model-path", str(tiny_model), "--pp-devices", "cpu", "--generation-config", str(defaults)]
    settings = with_default_model(parse_settings(flags, {}))

    async def talk() -> None:
        answers = LocalAnswers(settings)
        await answers.open()
        try:
            await chat_loop(console, answers, ask, PlainOutput())
            assert await answers.models() == ("rwkv7",)
        finally:
            await answers.close()

    asyncio.run(talk())
    assert console.stats.completion_tokens == 5 and "tokens/s" in console.handle_command("/stats")
    answers = [one["content"] for one in console.conversation.messages if one["role"] == "assistant"]
    output = capsys.readouterr().out
    assert len(answers) == 2 and all(printable(answer) in output for answer in answers)
    assert "error: max_tokens" in output


def test_the_page_names_existing_commands_and_settings() -> None:
    page = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
    console = Console()
    for name in re.findall(r"^\| `/(\w+)", page, re.MULTILINE):
        assert f"/{name}" in console.handle_command("/help")
    for line in re.findall(r"^python app\.py chat(.*)$", page, re.MULTILINE):
        given, rest = build_parser().parse_known_args(shlex.split(line, comments=True))
        assert not rest
        for name, value in given.set:
            console.handle_command(f"/set {name} {value}")
    assert console.settings == {"temperature": 0.5, "system": "Answer in one sentence."}


def test_the_pages_commands_run_as_printed(
    fake: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
    commands = [
        shlex.split(line, comments=True) for line in re.findall(r"^python app\.py (chat.*)$", page, re.MULTILINE)
    ]
    assert len(commands) == 3
    for number, command in enumerate(commands):
        url = [] if "--url" in command else ["--url", fake.url]  # their own engines: test_with_an_engine_of_its_own
        command = [fake.url if word == "http://127.0.0.1:8000" else word for word in command]
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"/set max_tokens 1\nHello {number}\n/quit\n"))
        assert main([*command, *url]) == 0
        assert f"Hello {number}\n" in capsys.readouterr().out


def test_finished_blocks_of_markdown_are_split_from_the_growing_one() -> None:
    assert split_blocks("") == ("", "") and split_blocks("one\ntwo") == ("", "one\ntwo")
    assert split_blocks("# A\n\none\n\n- b") == ("# A\n\none\n\n", "- b")
    code = "```python\na = 1\n\nb = 2\n"
    assert split_blocks(f"x\n\n{code}") == ("x\n\n", code), "a blank line in code ends no block"
    assert split_blocks(f"{code}```\n\ny") == (f"{code}```\n\n", "y")


def test_an_answer_is_rendered_on_a_terminal() -> None:
    seen = io.StringIO()
    output = MarkdownOutput(Screen(file=seen, force_terminal=True, width=60, color_system=None))
    for piece in ("# Ti", "tle\n\nsome **bo", "ld** text\x1b[2J\n\n```\nx = 1\n", "\ny = 2\n```\n\nlast"):
        output.write(piece)
    output.end()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.getvalue())
    assert "```" not in shown and "\ufffd[2J" in shown
    assert [word for word in ("Title", "bold text", "x = 1", "y = 2", "last") if word not in shown] == []


def test_models_and_states_are_settings() -> None:
    console = Console(models=("rwkv7", "small"))
    assert console.handle_command("/model") == "* rwkv7\n  small"
    assert console.handle_command("/model small") == "  rwkv7\n* small" and console.body()["model"] == "small"
    with pytest.raises(ConsoleError, match="there is no model 'x', only rwkv7, small"):
        console.handle_command("/model x")
    console.handle_command("/state poet")
    assert console.body()["state"] == "poet"
    console.handle_command("/state")
    assert "state" not in console.body() and console.handle_command("/stats") == "no answer yet"


def test_commands_values_and_files_are_completed(tmp_path: Path) -> None:
    (tmp_path / "talk.json").touch()
    completer = CommandCompleter({"/model": ("rwkv7", "small"), "/set": ("temperature",), "/load": ()})

    def completed(typed: str) -> list[str]:
        return [one.text for one in completer.get_completions(Document(typed), CompleteEvent())]

    assert (
        completed("/mo") == ["/model"]
        and completed("/model s") == ["small"]
        and completed("/set te") == ["temperature"]
    )
    assert completed(f"/load {tmp_path}/ta") == ["lk.json"] and completed("/other x") == [] and completed("hello") == []
