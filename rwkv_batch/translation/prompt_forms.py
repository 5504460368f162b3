"""Forms of translation prompts, and the one that each family of models was trained on."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import PurePath


class PromptForm(StrEnum):
    """How a model is asked for translations."""

    LABELS = "labels"
    """`English: …` and `Chinese:`, for World models and their translation fine-tunes.

    Translations of terms stand in the text, so a model needs no training for them.
    """
    TERM_LIST = "term-list"
    """The same with a line of terms before the text. The demo model is trained on it."""
    CHAT = "chat"
    """A chat of `User:` and `Assistant:` after a `System:` turn with the task, for the G1 models."""


_FILE_NAMES = (
    (r"rwkv7-demo", PromptForm.TERM_LIST),
    (r"translat|[-_.]mt[-_.]", PromptForm.LABELS),
    (r"g1", PromptForm.CHAT),
)
"""Parts of file names and their forms. The first that matches wins."""


def prompt_form(chosen: str, file: str = "") -> PromptForm:
    """Return the form with a name. "auto": that of the model file's family, else LABELS.

    file: path of the model, for "auto"
    """
    if chosen != "auto":
        return PromptForm(chosen)
    name = PurePath(file).name.lower()
    return next((form for part, form in _FILE_NAMES if re.search(part, name)), PromptForm.LABELS)
