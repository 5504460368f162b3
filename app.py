"""The command `rwkv-batch`: the service and other programs, each under its name."""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from pathlib import Path
from typing import NoReturn

_OWN_PACKAGES = {"programs", "routes", "rwkv_batch", "sampling", "state_pool", "native", "demo"}
try:
    from programs.serve.service import Supervisor, listen
    from programs.settings import Settings, SettingsError, parse_settings, program
    from programs.settings.model_file import with_default_model
    from rwkv_batch.errors import StartupError
    from rwkv_batch.ipc.process import LogConfig, set_up_logging
except ImportError as missing:  # e.g. after an update of the code alone
    if (missing.name or "").partition(".")[0] in _OWN_PACKAGES:
        raise
    sys.stderr.write(f"error: {missing}; install the packages of this version: pip install -r requirements.txt\n")
    sys.exit(1)

__all__ = ["Supervisor", "log_style", "main", "run", "serve"]

COMMANDS = {
    "serve": "start the service",
    "translate": "translate a file: a book, a Word file, subtitles, a program's strings",
    "batch": "run a file of prompts or of texts to translate",
    "chat": "talk to a model on the terminal",
    "tune": "make a tuned state or a LoRA from examples",
    "config": "write a file of settings, or show the settings in effect",
    "backup": "write sessions and files into one file, also while the service runs",
    "restore": "put a backup in place",
    "check": "verify every session of a database",
    "inspect": "describe a model, a tuned state, an adapter or a session file",
    "convert": "write a model as .pth, .safetensors or GGUF",
    "plan": "say how much memory a model needs, and what fits on a GPU",
    "doctor": "check this machine, the flags and the model",
    "bench": "measure speed; bench alone names its programs",
}
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
"""Module of each command with `main(arguments) -> exit code`. Imported when needed, as some import torch."""
_NOT_INSTALLED = "test"
"""Package of test helpers that some benches need. The wheel does not contain it."""


def log_style(settings: Settings) -> LogConfig:
    """Returns the log format and level of all processes."""
    return LogConfig(settings.service.log_format, settings.service.log_level)


def main(arguments: list[str]) -> int:
    """Runs the command that the arguments name, by default the service. Returns the exit code."""
    name = arguments[0] if arguments and not arguments[0].startswith("-") else ""
    arguments = arguments[bool(name) :]
    if name in _MODULES:
        return int(importlib.import_module(_MODULES[name]).main(arguments))
    if name in ("backup", "restore", "check"):
        from programs import backup

        return backup.main(name, arguments)
    if name == "bench":
        return bench(arguments)
    if name not in ("", "serve"):
        sys.stderr.write(f"error: unknown command {name!r}; the commands are {', '.join(COMMANDS)}\n")
        return 2
    return serve(arguments)


def overview() -> str:
    """Returns one line per command."""
    lines = [f"  {program(name):<{len(program()) + 8}} {text}" for name, text in COMMANDS.items()]
    return "\n".join(["Commands, each with its own --help:", *lines, f"Example: {program('serve')} --port 8000", ""])


def run() -> NoReturn:
    """The console script. Without arguments it shows the commands."""
    if len(sys.argv) == 1:
        sys.stdout.write(overview())
        sys.exit(0)
    sys.exit(main(sys.argv[1:]))


def bench_programs(folder: Path) -> list[str]:
    """Returns the names of a folder's programs for `python -m bench.NAME`.

    A program prints JSON. Helper processes do not.
    """
    texts = {file: file.read_text("utf-8") for file in folder.rglob("*.py")}
    files = [file for file, text in texts.items() if 'if __name__ == "__main__"' in text and "json.dumps(" in text]
    paths = [file.relative_to(folder).with_suffix("").parts for file in files]
    return sorted(".".join(path[:-1] if path[-1] == "__main__" else path) for path in paths)


def bench(arguments: list[str]) -> int:
    """Like `python -m bench.NAME`. Returns the exit code."""
    names = bench_programs(Path(__file__).parent / "bench")
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


def serve(arguments: list[str]) -> int:
    """Returns the exit code: 2 for a wrong flag, 1 for a failed start."""
    try:
        settings = parse_settings(arguments, os.environ)
    except SettingsError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    set_up_logging("supervisor", log_style(settings))
    try:
        listeners = listen(settings)  # before the model is created, so that the port is reserved from the start
        return Supervisor(with_default_model(settings), listeners=listeners).run()
    except StartupError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
