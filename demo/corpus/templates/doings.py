"""What is done: a clause alone, to whom something is given, by whom it was made so."""

from __future__ import annotations

from random import Random

from demo.corpus import lexicon
from demo.corpus.clauses import clause
from demo.corpus.nominal import GOODS, counted, noun_of, other_person, person, pick, something
from demo.corpus.templates.said import Said
from demo.corpus.times import when
from demo.corpus.verb_phrases import stative


def statement(rng: Random) -> Said:
    one = clause(rng)
    return f"{one.en}.", f"{one.chinese()}。"


def giving(rng: Random) -> Said:
    who = person(rng)
    other = other_person(rng, who)
    what = something(rng)
    past, base, zh = pick(rng, (("gave", "give", "送给"), ("lent", "lend", "借给"), ("sent", "send", "寄给"), ("brought", "bring", "带给"),
                                ("sold", "sell", "卖给"), ("handed", "hand", "递给")))  # fmt: skip
    draw = rng.random()
    if draw < 0.55:
        time, time_zh = when(rng, "past")
        return f"{who.en} {past} {other.object} {what.en} {time}.", f"{who.zh}{time_zh}{zh}了{other.zh}{what.zh}。"
    if draw < 0.85:
        time, time_zh = when(rng, "future")
        return f"{who.en} will {base} {other.object} {what.en} {time}.", f"{who.zh}{time_zh}会{zh}{other.zh}{what.zh}。"
    return f"please {base} me {what.en}.", f"请{zh}我{what.zh}。"


def passive(rng: Random) -> Said:
    for _ in range(30):
        what = counted(rng, noun_of(rng, (*GOODS, "artwork", "vehicle")), definite=True)
        verb = pick(rng, lexicon.verbs()[what.kind])
        if not stative(verb) and "……" not in verb.zh:
            break
    who = other_person(rng, what)
    time, time_zh = when(rng, "past")
    if rng.random() < 0.6:
        return (
            f"{what.en} {what.was} {verb.participle}{verb.tail} by {who.object}.",
            f"{what.zh}是{who.zh}{verb.zh}的。",
        )
    return (
        f"{what.en} {what.was} {verb.participle}{verb.tail} by {who.object} {time}.",
        f"{what.zh}是{who.zh}{time_zh}{verb.zh}的。",
    )
