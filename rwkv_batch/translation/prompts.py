"""What a model reads: style, context and earlier translations, then the text to translate.

A blank line ends a model's answer, so no turn has one. All prompts of a request begin with `shared_prompt`.
"""

from __future__ import annotations

from collections.abc import Iterable

from rwkv_batch.translation.context import Example
from rwkv_batch.translation.glossary import forms_of
from rwkv_batch.translation.languages import language_name
from rwkv_batch.translation.plan import Query
from rwkv_batch.translation.prompt_forms import PromptForm
from rwkv_batch.turn_text import format_turn

_NO_THOUGHTS = " <think>\n</think>\n"
FORMALITIES = {"default": "", "more": "Use formal, polite language.", "less": "Use informal language."}

MAX_STYLE_CHARACTERS = 1000
"""Of an instruction."""


def default_style(styles: Iterable[str], target: str) -> str:
    """Return the instruction for a target language, of texts like "de=Use the formal Sie"."""
    entries = (one.partition("=") for one in styles)
    name = language_name(target)
    return next((style.strip() for language, _, style in entries if language_name(language.strip()) == name), "")


def style_lines(instruction: str, formality: str, audience: str) -> str:
    """Return the lines about style. `formality` is a key of FORMALITIES."""
    readers = f"The readers are {audience.strip()}." if audience.strip() else ""
    return "\n".join(filter(None, (instruction.strip(), FORMALITIES[formality], readers)))


def shared_prompt(query: Query, form: PromptForm = PromptForm.LABELS) -> str:
    """Return context and earlier translations: the beginning of many prompts."""
    context = format_turn(query.context) if query.context.strip() else ""
    before = [context] if context else []
    if form is PromptForm.CHAT:
        source, target = language_name(query.source), language_name(query.target)
        task = f"System: Translate every text from {source} into {target}. Answer with the translation only."
        before = ["\n".join((task, *before))]
    for example in query.history:
        before += _turns(example, query, form)
    return "".join(f"{part}\n\n" for part in before)


def translation_prompt(query: Query, form: PromptForm = PromptForm.LABELS) -> str:
    """Return the prompt after `shared_prompt`: `English: …\\n\\nChinese:`, with English language names."""
    turns = [turn for example in query.examples for turn in _turns(example, query, form)]
    source, target = language_name(query.source), language_name(query.target)
    terms = term_line(query.prompt_terms) if query.prompt_terms else ""
    if form is PromptForm.CHAT:
        text = "\n".join(filter(None, (terms, format_turn(query.text))))
        return "\n\n".join((*turns, f"User: {text}", f"Assistant:{_NO_THOUGHTS}"))
    if form is PromptForm.LABELS or not terms:
        return "\n\n".join((*turns, f"{source}: {format_turn(query.text_with_terms)}", f"{target}:"))
    return "\n\n".join((*turns, terms, f"{source}: {format_turn(query.text)}", f"{target}:"))


def term_line(terms: Iterable[tuple[str, str]]) -> str:
    """Return `Terms: cat = Katze / Katzen; dog = Hund`."""
    return "Terms: " + "; ".join(f"{term} = {' / '.join(forms_of(to))}" for term, to in terms)


def prompt_stops(query: Query, form: PromptForm) -> list[str]:
    """Return the texts that end an answer: a blank line, or the next label."""
    labels = ("User",) if form is PromptForm.CHAT else map(language_name, (query.source, query.target))
    return ["\n\n", *(f"\n{label}:" for label in labels)]


def _turns(example: Example, query: Query, form: PromptForm) -> tuple[str, str]:
    labels = example.source, language_name(query.target)
    one, other = ("User", "Assistant") if form is PromptForm.CHAT else labels
    return f"{one}: {format_turn(example.text)}", f"{other}: {format_turn(example.translation)}"
