"""What a model reads: style, context and earlier translations, then the text to translate.

A blank line ends a model's answer, so no turn has one. All prompts of a request begin with `shared_prompt`.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from rwkv_batch.translation.context import Example
from rwkv_batch.translation.glossary import forms_of
from rwkv_batch.translation.languages import language_name
from rwkv_batch.translation.plan import Query
from rwkv_batch.turn_text import format_turn


class PromptForm(StrEnum):
    """How a model is asked for translations."""

    LABELS = "labels"
    """`English: …` and `Chinese:`. Translations of terms stand in the text, so a model needs no training for them."""
    TERM_LIST = "term-list"
    """The same with a line of terms before the text. The demo model is trained on it."""


FORMALITIES = {"default": "", "more": "Use formal, polite language.", "less": "Use informal language."}


def style_lines(instruction: str, formality: str, audience: str) -> str:
    """Return the lines about style. `formality` is a key of FORMALITIES."""
    readers = f"The readers are {audience.strip()}." if audience.strip() else ""
    return "\n".join(filter(None, (instruction.strip(), FORMALITIES[formality], readers)))


def shared_prompt(query: Query) -> str:
    """Return context and earlier translations: the beginning of many prompts."""
    before = [format_turn(query.context)] if query.context.strip() else []
    for example in query.history:
        before += _turns(example, language_name(query.target))
    return "".join(f"{part}\n\n" for part in before)


def translation_prompt(query: Query, form: PromptForm = PromptForm.LABELS) -> str:
    """Return `English: …\\n\\nChinese:`, with English language names. `shared_prompt` comes before it."""
    target = language_name(query.target)
    turns = [turn for example in query.examples for turn in _turns(example, target)]
    text = query.text_with_terms
    if form is PromptForm.TERM_LIST and query.prompt_terms:
        text = query.text
        turns.append(term_line(query.prompt_terms))
    return "\n\n".join((*turns, f"{language_name(query.source)}: {format_turn(text)}", f"{target}:"))


def term_line(terms: Iterable[tuple[str, str]]) -> str:
    """Return `Terms: cat = Katze / Katzen; dog = Hund`."""
    return "Terms: " + "; ".join(f"{term} = {' / '.join(forms_of(to))}" for term, to in terms)


def _turns(example: Example, target: str) -> tuple[str, str]:
    return f"{example.source}: {format_turn(example.text)}", f"{target}: {format_turn(example.translation)}"
