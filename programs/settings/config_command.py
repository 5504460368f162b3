"""The command `config`: writes a file of settings, or shows the settings in effect."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from programs.settings.command_line import build_parser as build_serve_parser
from programs.settings.command_line import parse_settings
from programs.settings.config_file import CONFIG_FILE, file_values
from programs.settings.flags import FLAGS, HEADINGS, default_text, field_default
from programs.settings.parser import CommandParser, reports_errors

_SECRET_FIELDS = {"password", "state_db", "checkpoint_store"}
"""Their values may hold a password."""


def template() -> str:
    """Return a file with every setting as a comment: meaning and default."""
    parts = [f"# Settings of rwkv-batch: {CONFIG_FILE[0]} FILE. Flags and environment variables override this file."]
    for section, flags in FLAGS.items():
        parts.append(f"\n# ---- {HEADINGS[section]}")
        for flag in flags:
            default = field_default(section, flag.field)
            value = json.dumps("" if default is None else default, ensure_ascii=False)
            parts += [f"\n# {flag.help}", f"# {flag.option.removeprefix('--')} = {value}"]
    return "\n".join([*parts, ""])


def in_effect(arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return one line per setting: name, value and origin. Raises SettingsError."""
    parse_settings(arguments, environment)
    flags_given = {
        name: text for name, text in vars(build_serve_parser().parse(arguments)[0]).items() if text is not None
    }
    path = {**environment, **flags_given}.get(CONFIG_FILE[1], "")
    origins: dict[str, Mapping[str, Any]] = {"flag": flags_given, "environment": environment}
    if path:
        origins[path] = file_values(path)
    lines = []
    for section, flags in FLAGS.items():
        for flag in flags:
            text, origin = default_text(section, flag), "default"
            for name_of_origin, source in reversed(origins.items()):
                for name in flag.variables:
                    if name in source:
                        text, origin = source[name], name_of_origin
            if text and flag.field in _SECRET_FIELDS:
                text = "***"
            lines.append(f"{flag.option.removeprefix('--'):<28} {text or '-':<24} {origin}\n")
    return "".join(lines)


def build_parser() -> CommandParser:
    parser = CommandParser(
        "config",
        "Prints a file of settings with comments. With --show, prints the settings in effect and their origins: "
        "a flag wins over an environment variable, a variable over the file, and the file over the default.",
        f"> rwkv.toml\n--show {CONFIG_FILE[0]} rwkv.toml --port 8080",
        takes_settings=True,
    )
    parser.add_argument("--show", action="store_true", help="print each setting's value and origin")
    return parser


@reports_errors()
def main(arguments: Sequence[str]) -> int:
    """Print the template, or the settings in effect. Returns the exit code."""
    parser = build_parser()
    chosen, flags = parser.parse(arguments)
    if flags and not chosen.show:
        parser.error(f"{flags[0]} is a flag of serve; give --show too")
    sys.stdout.write(in_effect(flags, os.environ) if chosen.show else template())
    return 0
