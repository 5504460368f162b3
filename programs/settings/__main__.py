"""Writes docs/settings.md."""

from programs.settings.page import SETTINGS_PAGE, markdown

SETTINGS_PAGE.write_text(markdown(), encoding="utf-8")
