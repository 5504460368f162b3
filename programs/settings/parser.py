"""The parser of every command: help that fits a screen, and the nearest flag for an unknown one."""

from __future__ import annotations

import argparse
import difflib
import functools
import shutil
import sys
import textwrap
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, ParamSpec

from programs.settings.config_file import CONFIG_FILE, options
from programs.settings.flags import FLAGS, REMOVED
from programs.settings.values import BOOLEANS, SettingsError, boolean, file_error

VERBOSE = "--verbose"
"""Flag of all commands, which `app.main` removes from the arguments."""
_MAX_WIDTH = 100
_HELP_COLUMN = 27
_FILES = ("FILE", "IN", "OUT", "DATA", "DATABASE", "INPUT", "OUTPUT")
"""Placeholders of arguments that are files."""
_SWITCHES = frozenset(
    option for flags in FLAGS.values() for flag in flags if flag.parse is boolean for option in flag.options
)
"""Settings that may stand without a value, which means yes."""


def program(command: str = "") -> str:
    """Return the command that the user typed, for messages."""
    name = Path(sys.argv[0]).name
    return f"{name if name == 'rwkv-batch' else 'python app.py'} {command}".rstrip()


Given = ParamSpec("Given")


def reports_errors(*failures: type[Exception]) -> Callable[[Callable[Given, int]], Callable[Given, int]]:
    """Return a decorator for a command's main function: errors are one line.

    The exit code is then 2 for a wrong flag (SettingsError), 1 for `failures`.
    """

    expected: tuple[type[Exception], ...] = (SettingsError, *failures)

    def decorate(main: Callable[Given, int]) -> Callable[Given, int]:
        @functools.wraps(main)
        def run(*given: Given.args, **named: Given.kwargs) -> int:
            try:
                return main(*given, **named)
            except expected as error:
                sys.stderr.write(f"error: {file_error(error) if isinstance(error, OSError) else error}\n")
                return 2 if isinstance(error, SettingsError) else 1

        return run

    return decorate


def settings_options() -> list[str]:
    """Return the flags of the service's settings."""
    return [*options(), CONFIG_FILE[0], *REMOVED]


class _Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns, _MAX_WIDTH)
        super().__init__(prog, max_help_position=_HELP_COLUMN, width=width)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        return f"{', '.join(action.option_strings)} {self._format_args(action, 'X')}"

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = (textwrap.wrap(line, width, break_on_hyphens=False) for line in text.splitlines())
        return "\n".join(indent + part for parts in lines for part in parts)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)


class _HelpAll(argparse.Action):
    """Prints the help with all flags and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        assert isinstance(parser, CommandParser)
        sys.stdout.write(parser.full_help())
        parser.exit()


class CommandParser(argparse.ArgumentParser):
    """The parser of a command. Its errors are SettingsErrors."""

    def __init__(self, command: str, description: str, example: str, *, takes_settings: bool = False) -> None:
        """takes_settings: flags of the service are allowed, and returned unread."""
        examples = "\n".join(f"  {program(command)} {line}".rstrip() for line in example.splitlines())
        super().__init__(
            prog=program(command),
            description=description,
            epilog=f"example{'s' if examples.count(chr(10)) else ''}:\n{examples}",
            formatter_class=_Formatter,
            allow_abbrev=False,
            add_help=False,
        )
        self.short_help: dict[argparse.Action, str] = {}
        """Texts of --help that differ from those of --help-all. SUPPRESS hides the flag."""
        self.takes_settings = takes_settings
        self.add_argument("-h", "--help", action="help", help="show the common flags and exit")
        self.add_argument(
            VERBOSE, action="store_true", default=argparse.SUPPRESS, help="log more, and show an error's traceback"
        )

    def hide(self, *names: str) -> None:
        """Show these flags under --help-all only."""
        if "--help-all" not in self._option_string_actions:
            self.add_argument(
                "--help-all", action=_HelpAll, nargs=0, default=argparse.SUPPRESS, help="show all flags and exit"
            )
        for action in self._actions:
            if set(names) & set(action.option_strings):
                self.short_help[action] = argparse.SUPPRESS

    def format_help(self) -> str:
        full = {action: action.help for action in self.short_help}
        try:
            for action, text in self.short_help.items():
                action.help = text
            return self.full_help()
        finally:
            for action, old in full.items():
                action.help = old

    def full_help(self) -> str:
        needed = [action for action in self._actions if action.required and action.option_strings]
        names = [str(one.metavar or one.dest).upper() for one in self._get_positional_actions()]
        names += [f"{one.option_strings[0]} {one.metavar or 'X'}" for one in needed]
        self.usage = " ".join([self.prog, *names, "[flags]"]).replace("%", "%%")
        return super().format_help()

    def parse(self, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Return the values, and the arguments that are settings of the service. Raises SettingsError."""
        known = {*self._option_string_actions, *(settings_options() if self.takes_settings else ())}
        for argument in arguments:
            if argument == "--":
                break
            name = argument.partition("=")[0]
            if name.startswith("--") and " " not in name and name not in known:
                nearest = difflib.get_close_matches(name, sorted(known), 1)
                self.error(f"there is no flag {name}" + (f"; did you mean {nearest[0]}?" if nearest else ""))
        own, settings = self._split(arguments) if self.takes_settings else (list(arguments), [])
        given, rest = self.parse_known_args(own)
        if rest:
            self.error(f"unexpected argument {rest[0]!r}")
        return given, settings

    def _split(self, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
        """Split into the command's own arguments, and the service's flags with their values. Raises SettingsError.

        A switch takes the argument after it only if that is a word such as yes or off.
        """
        own, settings, left = list[str](), list[str](), deque(arguments)
        flags = set(settings_options()) - set(self._option_string_actions)
        while left:
            argument = left.popleft()
            name = argument.partition("=")[0]
            if argument == "--":
                return [*own, argument, *left], settings
            if name not in flags:
                own.append(argument)
                continue
            settings.append(argument)
            if name in _SWITCHES:
                if argument == name and left and left[0].lower() in BOOLEANS:
                    settings.append(left.popleft())
            elif argument == name:
                if not left or left[0].startswith("--"):
                    self.error(f"argument {name}: expected one argument")
                settings.append(left.popleft())
        return own, settings

    def error(self, message: str) -> NoReturn:
        """Raises SettingsError."""
        raise SettingsError(f"{message}; see {self.prog} --help")

    @staticmethod
    def is_file(action: argparse.Action) -> bool:
        return action.type is Path or action.metavar in _FILES
