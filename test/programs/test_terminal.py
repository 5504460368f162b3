"""The commands as a person on a terminal sees them: each test drives a pseudo-terminal."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pexpect
import pytest

from test.serving import ROOT, START_TIMEOUT_S, Service, free_port

pytestmark = pytest.mark.slow

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


def terminal(*arguments: str, **environment: str) -> pexpect.spawn:
    """Runs a command of ours on a terminal of 100 columns."""
    kept = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    return pexpect.spawn(
        sys.executable,
        [str(ROOT / "app.py"), *arguments],
        cwd=str(ROOT),
        env={**kept, "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", **environment},
        timeout=START_TIMEOUT_S,
        encoding="utf-8",
        dimensions=(40, 100),
    )


def plain(text: str) -> str:
    return ESCAPES.sub("", text)


def test_a_start_says_what_is_served_where_and_how_to_stop(tiny_model: Path) -> None:
    port = free_port()
    flags = ("--model-path", str(tiny_model), "--host", "0.0.0.0", "--front", "none", "--state-db", "")
    screen = terminal(*flags, "--port", str(port), "--max-running", "4")
    screen.expect("Ctrl-C stops it: running requests get 30 s")
    lines = [line.partition("INFO")[2].strip() for line in plain(screen.before).splitlines() if "INFO" in line]
    wanted = ("model rwkv7: RWKV-7, ", "device cpu (", f"serving rwkv7 on http://0.0.0.0:{port}")
    assert [line for line in lines if line.startswith(wanted)] == [
        next(line for line in lines if line.startswith(start)) for start in wanted
    ]
    assert "up to 4 rows at once" in plain(screen.before)
    assert re.search(r"\x1b\[33m[^\n]*WARNING[^\n]*NO PASSWORD", screen.before), "warnings are yellow"
    taken = terminal(*flags, "--port", str(port))
    taken.expect(r"error: port \d+ on 0.0.0.0 is in use by \S+ \(process \d+\); stop it or give another --port")
    taken.expect(pexpect.EOF)
    screen.sendintr()
    screen.expect("shutting down: .*stopped")
    screen.expect(pexpect.EOF)
    screen.close()
    taken.close()
    assert (screen.exitstatus, taken.exitstatus) == (0, 1)


def test_control_c_says_what_it_finishes_and_twice_cuts_it_and_no_color_has_no_colours(tiny_model: Path) -> None:
    port = free_port()
    flags = ("--model-path", str(tiny_model), "--host", "0.0.0.0", "--front", "none", "--state-db", "")
    screen = terminal(*flags, "--port", str(port), NO_COLOR="1")
    screen.expect("NO PASSWORD[^\n]*\n")
    assert "\x1b[33m" not in screen.before + screen.after
    screen.expect("Ctrl-C stops it")
    body = {"contents": ["x"], "max_tokens": 8000, "ignore_eos": True, "stop_tokens": [], "stream": True}
    with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        screen.sendintr()
        screen.expect("rows to finish: 1, in at most 30 s")
        screen.sendintr()
        assert any("the service was shut down before this answer was complete" in line for line in lines)
    screen.expect(pexpect.EOF)
    screen.close()
    assert screen.exitstatus == 0


def test_a_run_over_a_file_has_a_bar(fake: Service, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("one\n")
    flags = ("--task", "complete", "--max-tokens", "1", "--url", fake.url)
    screen = terminal("batch", str(tmp_path / "one.txt"), "-o", str(tmp_path / "out.txt"), *flags)
    screen.expect(r"100%\|█+\| 1 line \(100% read\), 0 failed")
    screen.expect(pexpect.EOF)
    screen.close()
    assert screen.exitstatus == 0 and "lines   1; 0 failed" in plain(screen.before)


PROMPT = r"\x1b\[\?2004h.*?> "
"""The prompt as it is drawn when it begins to read."""


def say(screen: pexpect.spawn, keys: str, answer: str) -> None:
    """Types keys, and waits for an answer and the next prompt. Keys that come before a prompt may be lost."""
    screen.send(keys)
    screen.expect(answer)
    screen.expect(PROMPT)


@pytest.fixture
def talk(fake: Service, tmp_path: Path) -> Iterator[pexpect.spawn]:
    history = str(tmp_path / "history")
    screen = terminal("chat", "--url", fake.url, "--set", "max_tokens", "2", "--history", history)
    screen.expect("/help lists the commands; Ctrl-D leaves")
    screen.expect(PROMPT)
    yield screen
    screen.close(force=True)


def test_a_conversation_on_a_terminal(talk: pexpect.spawn, tmp_path: Path) -> None:
    """The fake engine repeats the user's last message once per token."""
    say(talk, "one\x1b\rtwo\r", "twoone")  # Alt+Enter begins a second line
    say(talk, "/stats\r", r"last answer: \d+ prompt tokens, 2 generated, first after [\d.]+ s")
    say(talk, "/model\r", r"\* rwkv7")
    say(talk, "/set temperature -1\r", "error: temperature")
    talk.send("/quit\r")
    talk.expect(pexpect.EOF)
    talk.close()
    assert talk.exitstatus == 0 and "+one\n+two" in (tmp_path / "history").read_text()


def test_control_c_stops_an_answer_and_control_d_leaves(talk: pexpect.spawn) -> None:
    say(talk, "/set max_tokens 1000000\r", "max_tokens is 1000000")
    talk.send("endless\r")
    talk.expect("endlessendless")
    talk.sendintr()
    talk.expect(PROMPT)
    say(talk, "/branch\r", r"\* main \(2 messages\)")
    talk.sendeof()
    talk.expect(pexpect.EOF)
    talk.close()
    assert talk.exitstatus == 0
