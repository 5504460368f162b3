"""The service: settings in, an engine process and HTTP worker processes out. What runs them is `supervisor/`."""

from __future__ import annotations

import contextlib
import logging
import os
import runpy
import sys
from pathlib import Path
from typing import NoReturn

import msgspec

from native.cache_folder import VARIABLE, cache_folder
from rwkv_batch.errors import StartupError
from rwkv_batch.ipc.process import LogStyle, set_up_logging
from settings import Settings, SettingsError, parse_settings
from supervisor.service import Supervisor, listen

logger = logging.getLogger("supervisor")

__all__ = ["Supervisor", "log_style", "main", "run", "serve", "with_model"]

COMMANDS = ("serve", "batch", "chat", "bench")
_NOT_INSTALLED = "test"
"""What some measuring programs need and a wheel does not bring."""


def log_style(settings: Settings) -> LogStyle:
    """How every process logs."""
    return LogStyle(settings.service.log_format, settings.service.log_level)


def with_model(settings: Settings) -> Settings:
    """Settings with a model file: the given one, else the demo's. Raises StartupError if it cannot be read."""
    path = settings.engine.model_path
    if not path:
        try:
            path = str(_demo_model())
        except OSError as error:
            raise StartupError(
                f"the demo model cannot be written to {cache_folder()} ({error.strerror}); "
                f"give --model-path, or another folder as {VARIABLE}"
            ) from None
    try:
        if not Path(path).is_dir():  # of folders the engine says what is in them
            with open(path, "rb"):
                pass
    except OSError as error:
        raise StartupError(f"model file {path} cannot be read ({error.strerror}); check --model-path") from None
    return msgspec.structs.replace(settings, engine=msgspec.structs.replace(settings.engine, model_path=path))


def _demo_model() -> Path:
    """The demo model's file; without one, random weights in the same form."""
    with contextlib.suppress(ImportError, FileNotFoundError):
        from demo.files import ensure_model

        path = Path(ensure_model())
        logger.info("no --model-path given: serving the built-in demo model %s", path)
        return path
    path = cache_folder() / "random.pth"
    if not path.exists():
        from demo.random_weights import write_random_model

        path.parent.mkdir(parents=True, exist_ok=True)
        half = path.with_name(f"half-{os.getpid()}.pth")
        write_random_model(half, layers=4, width=256)
        half.replace(path)
    logger.warning("no --model-path and no demo model: serving random weights (%s), whose text is meaningless", path)
    return path


def main(arguments: list[str]) -> int:
    """Run the service, or the command that is the first word; returns the exit code."""
    if arguments[:1] == ["batch"]:
        from bulk import command

        return command.main(arguments[1:], with_model)
    if arguments[:1] == ["chat"]:
        from console import command as console

        return console.main(arguments[1:], with_model)
    if arguments[:1] == ["bench"]:
        return bench(arguments[1:])
    if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        sys.stderr.write(f"error: no command is called {arguments[0]!r}; there are {', '.join(COMMANDS)}\n")
        return 2
    return serve(arguments[1:] if arguments[:1] == ["serve"] else arguments)


def run() -> NoReturn:
    """The command `rwkv-batch` of an installed package."""
    sys.exit(main(sys.argv[1:]))


def measuring_programs(folder: Path) -> list[str]:
    """Names of the programs in a folder, as `python -m bench.NAME` takes them: a room's own is called as the room.

    What they print is JSON; processes that some of them start print none.
    """
    texts = {file: file.read_text("utf-8") for file in folder.rglob("*.py")}
    files = [file for file, text in texts.items() if 'if __name__ == "__main__"' in text and "json.dumps(" in text]
    paths = [file.relative_to(folder).with_suffix("").parts for file in files]
    return sorted(".".join(path[:-1] if path[-1] == "__main__" else path) for path in paths)


def bench(arguments: list[str]) -> int:
    """Run a program of bench/ by its name, as `python -m bench.NAME` does; returns the exit code."""
    names = measuring_programs(Path(__file__).parent / "bench")
    if not arguments or arguments[0] not in names:
        sys.stderr.write(f"error: bench wants the name of a measuring program: {', '.join(names)}\n")
        return 2
    sys.argv = [f"bench {arguments[0]}", *arguments[1:]]
    try:
        runpy.run_module(f"bench.{arguments[0]}", run_name="__main__")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        wanted = f"needs {package}: pip install -r requirements-dev.txt, or make install-dev, brings it"
        if package == _NOT_INSTALLED:
            wanted = "needs the tests' fakes: run it in a clone of the repository"
        sys.stderr.write(f"error: bench {arguments[0]} {wanted}\n")
        return 1
    return 0


def serve(arguments: list[str]) -> int:
    """Run the service; returns the exit code: 2 for a bad flag, 1 for what cannot be served."""
    try:
        settings = parse_settings(arguments, os.environ)
    except SettingsError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    set_up_logging("supervisor", log_style(settings))
    try:
        listeners = listen(settings)  # before a model is made, so that the port is ours from the start
        return Supervisor(with_model(settings), listeners=listeners).run()
    except StartupError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1


if __name__ == "__main__":
    run()
