"""Whole sentences: pairs of the templates, each as often as it has weight."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from demo.corpus.interface import interface
from demo.corpus.templates.doings import giving, passive, statement
from demo.corpus.templates.figures import calendar, number, price
from demo.corpus.templates.joined import at_the_time, because, condition, contrast, reported
from demo.corpus.templates.people import about_oneself
from demo.corpus.templates.phrases import identity, noun_phrase
from demo.corpus.templates.places import location, there_is, travel
from demo.corpus.templates.qualities import (
    comparison,
    exclamation,
    general_truth,
    material,
    quality,
    quality_question,
    relative_clause,
)
from demo.corpus.templates.questions import negated_or_asked, wh_question
from demo.corpus.templates.requests import ordering, request
from demo.corpus.templates.said import Template
from demo.corpus.templates.weather import weather

TEMPLATES: tuple[tuple[Template, float], ...] = (
    (statement, 24), (negated_or_asked, 8), (quality, 7), (quality_question, 2), (comparison, 3), (about_oneself, 7), (because, 5),
    (condition, 3), (at_the_time, 4), (contrast, 4), (reported, 3), (wh_question, 5), (there_is, 4), (location, 3), (price, 3),
    (calendar, 3), (weather, 3), (request, 4), (ordering, 3), (travel, 4), (giving, 3), (relative_clause, 3), (passive, 3),
    (material, 1), (general_truth, 2), (exclamation, 1.5), (identity, 2), (noun_phrase, 4), (number, 1), (interface, 9),
)  # fmt: skip
_CHOICES = [template for template, _ in TEMPLATES]
_WEIGHTS = [weight for _, weight in TEMPLATES]


@dataclass(frozen=True, slots=True)
class Pair:
    """A sentence in both languages; `meanings` decide which side of the split it is on."""

    en: str
    zh: str
    meanings: tuple[str, ...]


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def sentence(rng: Random) -> Pair:
    """One sentence pair of the grammar, on either side of the split."""
    while True:
        said = rng.choices(_CHOICES, _WEIGHTS)[0](rng)
        en, zh = said[0], said[1]
        if en and zh:
            parts = said[2] if len(said) == 3 else ()
            return Pair(_capital(en), zh, (en, *parts))
