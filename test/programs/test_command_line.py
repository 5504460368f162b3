"""The command line of every command: help, unknown flags, completion, unexpected errors."""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import app
from app import COMMANDS, main, overview, parser_of
from programs.settings.flags import FLAGS
from programs.tools.completion import SHELLS

ROWS, COLUMNS = 40, 80
"""A screen."""


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_a_screen_and_ends_with_an_example(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    try:
        main([name, "--help"])
    except SystemExit as ended:
        assert not ended.code
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("usage: ") and f" {name} " in lines[0]
    assert len(lines) <= ROWS and max(map(len, lines[:3])) <= COLUMNS
    assert any(line.startswith("example") for line in lines[-5:])


def test_help_all_shows_what_help_hides(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        parser = parser_of(name)
        short, full = parser.format_help(), parser.full_help()
        hidden = [action for action, text in parser.short_help.items() if text == argparse.SUPPRESS]
        for action in hidden:
            option = action.option_strings[-1]
            assert f"{option} " not in short and option in full
        assert ("--help-all" in short) == bool(hidden)
    with pytest.raises(SystemExit):
        main(["serve", "--help-all"])
    assert "--prefix-cache-slots" in capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_flags_of_help_are_no_values(name: str) -> None:
    parser = parser_of(name)
    assert not {"help", "help_all", "verbose", "version"} & {
        action.dest for action in parser._actions if action.default is not argparse.SUPPRESS
    }


def test_five_commands_are_shown_first() -> None:
    lines = [line for line in overview().splitlines() if line.startswith("  ")]
    assert [
        line.split()[-1 - len(COMMANDS[name].split())] for line, name in zip(lines, COMMANDS, strict=False)
    ] == list(COMMANDS)[:5]
    assert all(name in overview() and COMMANDS[name] in overview(len(COMMANDS)) for name in COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        (["serve", "--modle-path=x"], "--model-path"),
        (["chat", "--ulr", "x"], "--url"),
        (["chat", "--dtpye", "int8"], "--dtype"),
        (["batch", "--tsak", "chat"], "--task"),
        (["translate", "a.txt", "--target-lagn", "zh"], "--target-lang"),
        (["tune", "a.jsonl", "--epoch", "2"], "--epochs"),
        (["plan", "--modl", "x"], "--model"),
        (["inspect", "x", "--checksums"], "--checksum"),
        (["convert", "x", "y", "--dtypes", "f16"], "--dtype"),
        (["doctor", "--prot", "1"], "--port"),
        (["restore", "x.tar", "--replaced"], "--replace"),
        (["config", "--shwo"], "--show"),
        (["comletion"], "completion"),
    ],
)
def test_the_nearest_flag_is_named(arguments: list[str], nearest: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert f"did you mean {nearest}?" in error and error.count("\n") == 1


@pytest.mark.parametrize("flag", [(), ("--verbose",)])
def test_an_unexpected_error_is_one_line_and_a_traceback_on_request(flag: tuple[str, ...]) -> None:
    program = "import app, sys; app.serve = {}.__getitem__; app.main(sys.argv[1:])"
    command = [sys.executable, "-c", program, *flag, "serve"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    if flag:
        assert "Traceback" in done.stderr and "TypeError" in done.stderr
    else:
        assert done.stderr.startswith("error: TypeError: ") and "--verbose" in done.stderr
        assert done.stderr.count("\n") == 1


def test_a_reader_that_leaves_is_no_error() -> None:
    command = f"{sys.executable} app.py completion bash | head -1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, cwd=app.__file__[:-6]
    )
    assert (done.stderr, done.returncode) in (("", 0), ("", 141))


def test_a_program_that_runs_a_command_keeps_its_signals(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGPIPE)
    assert main(["completion", "bash"]) == 0 and capsys.readouterr().out
    assert signal.getsignal(signal.SIGPIPE) is before is signal.SIG_IGN


def completed(shell: str, script: Path, words: list[str]) -> set[str]:
    """Returns what a shell offers for the last word."""
    if shell == "bash":
        program = (
            'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}; '
            "$(complete -p rwkv-batch | sed 's/.*-F \\([^ ]*\\).*/\\1/') rwkv-batch \"${@: -1}\"; "
            'printf "%s\\n" "${COMPREPLY[@]}"'
        )
        command = ["bash", "-c", program, "-", str(script), *words]
    else:
        command = ["fish", "--no-config", "-c", f"source {script}; complete -C '{' '.join(words)}'"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=script.parent)
    return {line.split("\t")[0].strip() for line in done.stdout.splitlines()}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes_commands_flags_choices_and_files(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    script = tmp_path / "script"
    script.write_text(text)
    for name in (*COMMANDS, *(flag.option.removeprefix("--") for flags in FLAGS.values() for flag in flags)):
        assert name in text
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed; the script was made, but not run")
    assert subprocess.run([shell, "-n", str(script)]).returncode == 0
    if shell == "zsh":
        return  # completes on a terminal only
    (tmp_path / "weights.gguf").touch()
    for words, wanted in (
        (["rwkv-batch", "trans"], "translate"),
        (["rwkv-batch", "serve", "--model-p"], "--model-path"),
        (["rwkv-batch", "chat", "--model-p"], "--model-path"),
        (["rwkv-batch", "serve", "--model-path", "weig"], "weights.gguf"),
        (["rwkv-batch", "convert", "weig"], "weights.gguf"),
        (["rwkv-batch", "tune", "x", "--method", "stat"], "state+lora"),
    ):
        assert wanted in completed(shell, script, words), words


def test_help_does_not_import_slow_packages() -> None:
    program = """import contextlib, sys, app
app.main(["--help"]); app.main(["config", "--show"])
for name in app.COMMANDS:
    with contextlib.suppress(SystemExit):
        assert app.main([name, "--help"]) == 0
    assert app.parser_of(name).prog.endswith(name)
sys.exit(str({"torch", "numpy", "pydantic", "lxml", "aiohttp", "prompt_toolkit"} & {*sys.modules} or ""))"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert not ended.stderr.strip() and ended.stdout.count("usage: ") == 1 + len(app.COMMANDS)
