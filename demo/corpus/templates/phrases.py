"""Noun phrases: alone, as in a list, or named with `this is`."""

from __future__ import annotations

from random import Random

from demo.corpus.nominal import THINGS, counted, name, noun_of, person, pick, portion, professional, relative, something
from demo.corpus.templates.said import Said
from demo.corpus.times import clock, date, span


def noun_phrase(rng: Random) -> Said:
    """A phrase without a verb, as in a list, a menu or a heading."""
    draw = rng.random()
    if draw < 0.55:
        what = counted(rng, noun_of(rng, (*THINGS, "show", "building", "thing")))
    elif draw < 0.75:
        what = portion(rng, pick(rng, ("drink", "dish", "grocery")))
    elif draw < 0.85:
        what = person(rng)
    else:
        en, zh = pick(rng, (clock, date, span))(rng)
        return en, zh
    return what.en, what.zh


def identity(rng: Random) -> Said:
    draw = rng.random()
    if draw < 0.4:
        what = something(rng)
        if what.many:
            return f"these are {what.en}.", f"这些是{what.zh}。"
        if what.en.startswith(("this", "that")):
            return f"I like {what.en} best.", f"我最喜欢{what.zh}。"
        return f"this is {what.en}.", f"这是{what.zh}。"
    if draw < 0.6:
        who = relative(rng)
        return f"this is {who.en}.", f"这是{who.zh}。"
    if draw < 0.8:
        who, called = relative(rng), name(rng)
        return f"{who.en}'s name is {called.en}.", f"{who.zh}叫{called.zh}。"
    who = professional(rng)
    known = name(rng)
    if who.many:
        return f"{who.en} know {known.en}.", f"{who.zh}认识{known.zh}。"
    return f"{who.en} is called {known.en}.", f"{who.zh}名叫{known.zh}。"
