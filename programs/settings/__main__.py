"""Writes docs/settings.md from the table of flags."""

from __future__ import annotations

from pathlib import Path

from programs.settings.flags import FLAGS, HEADINGS, PASSWORD_FILE, default_text
from routes.config import HttpConfig

SETTINGS_PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"


def markdown() -> str:
    """docs/settings.md: every flag with its variable, default and meaning."""
    parts = [
        "# Settings\n\nAfter this page you know every setting, its default and where to give it.\n\n"
        "Each setting is a flag, an environment variable, and a line of the TOML file of `--config FILE`."
        " A flag wins over a variable, and a variable over the file. `rwkv-batch config` prints such a file; with "
        "`--show` it prints each value and its origin. A list is separated by commas, or is a list in the file. "
        "`python -m programs.settings` writes this page.\n"
    ]
    for section, flags in FLAGS.items():
        rows = ["| flag | variable | default | meaning |", "|---|---|---|---|"]
        for flag in flags:
            default = default_text(section, flag)
            meaning = flag.help + (f" (older name: `{flag.options[1]}`)" if flag.alias else "")
            cells = (f"`{flag.option}`", f"`{flag.variable}`", f"`{default}`" if default else "", meaning)
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        if section is HttpConfig:
            rows.append(f"| `{PASSWORD_FILE[0]}` | `{PASSWORD_FILE[1]}` | | file whose first line is the password |")
        parts.append(f"## {HEADINGS[section]}\n\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    SETTINGS_PAGE.write_text(markdown(), encoding="utf-8")
