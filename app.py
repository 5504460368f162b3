"""The command `rwkv-batch`: the service and other programs, each under its name."""

from __future__ import annotations

import difflib
import importlib
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import NoReturn

_OWN_PACKAGES = {"programs", "routes", "rwkv_batch", "sampling", "state_pool", "native", "demo"}
try:
    from programs.serve.service import Supervisor, listen
    from programs.settings import CommandParser, Settings, parse_settings, program, reports_errors
    from programs.settings.command_line import build_parser as build_serve_parser
    from programs.settings.model_file import with_default_model
    from programs.settings.parser import VERBOSE
    from rwkv_batch.errors import StartupError
    from rwkv_batch.ipc.process import LogConfig, set_up_logging
except ImportError as missing:  # e.g. after an update of the code alone
    if (missing.name or "").partition(".")[0] in _OWN_PACKAGES:
        raise
    environment = Path(__file__).parent / ".venv" / "bin" / "python"
    remedy = "install the packages of this version: pip install -r requirements.txt"
    if environment.exists() and Path(sys.prefix).resolve() != environment.parents[1].resolve():
        remedy = f"use {environment}, where make serve installed the packages"
    sys.stderr.write(f"error: {missing}; {remedy}\n")
    sys.exit(1)

__all__ = ["Supervisor", "log_style", "main", "run", "serve"]

COMMANDS = {
    "serve": "start the service",
    "chat": "talk to a model on the terminal",
    "translate": "translate a file: a book, a Word file, subtitles, a program's strings",
    "batch": "run a file of prompts or of texts to translate",
    "doctor": "check this machine, the flags and the model",
    "inspect": "describe a model, a tuned state, an adapter or a session file",
    "plan": "say how much memory a model needs, and what fits on a GPU",
    "convert": "write a model as .pth, .safetensors or GGUF",
    "tune": "make a tuned state or a LoRA from examples",
    "config": "write a file of settings, or show the settings in effect",
    "backup": "write sessions and files into one file, also while the service runs",
    "restore": "put a backup in place",
    "check": "verify every session of a database",
    "completion": "print a script that completes commands and flags in bash, zsh or fish",
    "bench": "measure speed; bench alone names its programs",
}
_FIRST = 5
"""Commands that are shown without arguments."""
_MODULES = {
    "batch": "programs.batch.command",
    "translate": "programs.batch.translate",
    "chat": "programs.chat.command",
    "tune": "programs.tune",
    "config": "programs.settings.config_command",
    "inspect": "programs.tools.inspect_file",
    "convert": "programs.tools.convert",
    "plan": "programs.tools.plan",
    "doctor": "programs.tools.doctor",
}
"""Module of each command with `main(arguments) -> exit code`. Imported when needed, as most import torch."""
_PARSERS = {
    "batch": ("programs.batch.options", "build_parser"),
    "translate": ("programs.batch.options", "build_translate_parser"),
    "chat": ("programs.chat.options", "build_parser"),
    "tune": ("programs.tune", "build_parser"),
    "config": ("programs.settings.config_command", "build_parser"),
    "inspect": ("programs.tools.parsers", "inspect_parser"),
    "convert": ("programs.tools.parsers", "convert_parser"),
    "plan": ("programs.tools.parsers", "plan_parser"),
    "doctor": ("programs.tools.parsers", "doctor_parser"),
    "completion": ("programs.tools.completion", "build_parser"),
}
"""Module and function of each parser. They do not import torch, so help is fast."""
_HELP = {"-h", "--help", "--help-all"}
_BACKUP = ("backup", "restore", "check")
_PRINTS = ("inspect", "plan", "doctor", "config", "completion")
"""Commands that only print. They end silently if their reader does, as `head`."""
_LEVEL_VARIABLE = "RWKV_LOG_LEVEL"
_NOT_INSTALLED = "test"
"""Package of test helpers that some benches need. The wheel does not contain it."""


def log_style(settings: Settings) -> LogConfig:
    """Returns the log format and level of all processes."""
    return LogConfig(settings.service.log_format, settings.service.log_level)


def main(arguments: list[str]) -> int:
    """Runs the command that the arguments name, by default the service. Returns the exit code."""
    sys.excepthook = report_defect
    if VERBOSE in arguments:
        sys.excepthook = sys.__excepthook__
        os.environ[_LEVEL_VARIABLE] = "debug"
        arguments = [argument for argument in arguments if argument != VERBOSE]
    name = arguments[0] if arguments and not arguments[0].startswith("-") else ""
    arguments = arguments[bool(name) :]
    if name in _MODULES:
        if not _HELP.isdisjoint(arguments):
            return print_help([name, *arguments])
        return int(importlib.import_module(_MODULES[name]).main(arguments))
    if name in _BACKUP:
        from programs import backup

        return backup.main(name, arguments)
    if name == "completion":
        return completion(arguments)
    if name == "bench":
        return bench(arguments)
    if name not in ("", "serve"):
        nearest = difflib.get_close_matches(name, COMMANDS, 1)
        remedy = f"did you mean {nearest[0]}?" if nearest else f"the commands are {', '.join(COMMANDS)}"
        sys.stderr.write(f"error: there is no command {name!r}; {remedy}\n")
        return 2
    if not name and arguments[:1] in (["-h"], ["--help"]):
        sys.stdout.write(overview(len(COMMANDS)))
        return 0
    return serve(arguments)


def report_defect(kind: type[BaseException], error: BaseException, traceback: object) -> None:
    """Writes an unexpected error as one line. For `sys.excepthook`."""
    if issubclass(kind, KeyboardInterrupt):
        return
    sys.stderr.write(
        f"error: {kind.__name__}: {error}; this is a defect of rwkv-batch: give {VERBOSE} too for the traceback, and "
        "report it\n"
    )


def overview(count: int = _FIRST) -> str:
    """Returns one line for each of the first commands, and the names of the others."""
    shown = list(COMMANDS.items())[:count]
    width = len(program()) + 1 + max(len(name) for name, _ in shown)
    lines = [f"  {program(name):<{width}}  {text}" for name, text in shown]
    others = list(COMMANDS)[count:]
    more = [f"More: {', '.join(others)}; {program('--help')} describes them."] if others else []
    return "\n".join(
        [
            f"usage: {program('COMMAND')} [flags]",
            "",
            *lines,
            "",
            *more,
            f"Each command has --help, as {program('serve --help')}.",
            "",
        ]
    )


def run() -> NoReturn:
    """The console script. Without arguments it shows the commands."""
    if len(sys.argv) == 1:
        sys.stdout.write(overview())
        sys.exit(0)
    start()


def start() -> NoReturn:
    """Runs the command of this process's arguments."""
    name = next((argument for argument in sys.argv[1:] if argument != VERBOSE), "")
    if name in _PRINTS:  # not in `main`, whose caller may be another program with its own handler
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main(sys.argv[1:]))


@reports_errors()
def print_help(arguments: list[str]) -> int:
    """Prints the help of a command, the first argument. Returns the exit code."""
    parser_of(arguments[0]).parse(arguments[1:])
    return 0


@reports_errors()
def completion(arguments: list[str]) -> int:
    """Prints the completion script of a shell. Returns the exit code."""
    from programs.tools.completion import script

    shell = parser_of("completion").parse(arguments)[0].shell
    sys.stdout.write(script(shell, {name: (text, parser_of(name)) for name, text in COMMANDS.items()}))
    return 0


def parser_of(name: str) -> CommandParser:
    """Returns the parser of a command."""
    if name in _PARSERS:
        module, function = _PARSERS[name]
        parser: CommandParser = getattr(importlib.import_module(module), function)()
        return parser
    if name in _BACKUP:
        from programs import backup

        return backup.build_parser(name)
    if name == "bench":
        bench_parser = CommandParser("bench", "Runs a program that measures.", "cpu --help")
        bench_parser.add_argument("program", choices=bench_programs(Path(__file__).parent / "bench"))
        return bench_parser
    return build_serve_parser()


def bench_programs(folder: Path) -> list[str]:
    """Returns the names of a folder's programs for `python -m bench.NAME`."""
    files = [file for file in folder.rglob("*.py") if 'if __name__ == "__main__"' in file.read_text("utf-8")]
    paths = [file.relative_to(folder).with_suffix("").parts for file in files]
    return sorted(".".join(path[:-1] if path[-1] == "__main__" else path) for path in paths)


def bench(arguments: list[str]) -> int:
    """Like `python -m bench.NAME`. Returns the exit code."""
    names = bench_programs(Path(__file__).parent / "bench")
    if arguments[:1] in (["-h"], ["--help"]):
        parser_of("bench").print_help()
        return 0
    if not arguments or arguments[0] not in names:
        sys.stderr.write(f"error: bench needs the name of a program: {', '.join(names)}\n")
        return 2
    sys.argv = [f"bench {arguments[0]}", *arguments[1:]]
    try:
        runpy.run_module(".".join(filter(None, (__package__, "bench", arguments[0]))), run_name="__main__")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        remedy = f"needs {package}; install it with pip install -r requirements-dev.txt or make install-dev"
        if package == _NOT_INSTALLED:
            remedy = "needs the test helpers; run it in a clone of the repository"
        sys.stderr.write(f"error: bench {arguments[0]} {remedy}\n")
        return 1
    return 0


@reports_errors(StartupError)
def serve(arguments: list[str]) -> int:
    """Returns the exit code: 2 for a wrong flag, 1 for a failed start."""
    settings = parse_settings(arguments, os.environ)
    set_up_logging("supervisor", log_style(settings))
    listeners = listen(settings)  # before the model is created, so that the port is reserved from the start
    return Supervisor(with_default_model(settings), listeners=listeners).run()


if __name__ == "__main__":
    start()
