"""The command `completion`: a script that completes commands, flags, choices and files in a shell."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import shtab

from programs.settings import CommandParser
from programs.settings.command_line import build_parser as build_serve_parser

NAME = "rwkv-batch"
SHELLS = ("bash", "zsh", "fish")


def build_parser() -> CommandParser:
    parser = CommandParser(
        "completion",
        f"Prints a script that completes {NAME} in a shell.",
        "bash > ~/.local/share/bash-completion/completions/rwkv-batch\n"
        "zsh > ~/.zfunc/_rwkv-batch    # a folder of $fpath\n"
        "fish > ~/.config/fish/completions/rwkv-batch.fish",
    )
    parser.add_argument("shell", choices=SHELLS)
    return parser


def script(shell: str, commands: Mapping[str, tuple[str, CommandParser]]) -> str:
    """Returns the script. commands: name -> one line of help, and the parser."""
    root = argparse.ArgumentParser(prog=NAME)
    tree = root.add_subparsers()
    for name, (text, parser) in commands.items():
        parents = [parser, build_serve_parser()] if parser.takes_settings else [parser]
        child = tree.add_parser(name, help=text, parents=parents, add_help=False, conflict_handler="resolve")
        _complete_files(child)
    return str(shtab.complete(root, shell))


def _complete_files(parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:
        if CommandParser.is_file(action):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
