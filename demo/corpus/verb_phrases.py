"""Verb phrases: a verb and what it acts on, and how and where that is done."""

from __future__ import annotations

from random import Random

from demo.corpus import lexicon
from demo.corpus.lexicon import Verb
from demo.corpus.nominal import FOOD, Nominal, counted, noun_of, other_person, pick, portion, term

STATES = frozenset(
    "like need want own know love hate trust miss remember respect admire envy believe have understand value "
    "know|a lot about care|about believe|in be|good be|interested".split()
)
INSIDE = frozenset(
    "park kitchen garden village forest mountains bedroom bathroom classroom laboratory library museum office "
    "restaurant hotel hospital supermarket café bar gallery studio courtroom basement dormitory teahouse warehouse".split()
)
ONTO = frozenset(("beach", "square", "playground", "farm", "balcony"))
HAVE = Verb("have", "had", "had", "", "有", False)


def place(rng: Random, *, towns: bool = True) -> tuple[str, str]:
    """Where: `in the park` 在公园, `in Berlin` 在柏林."""
    draw = rng.random()
    if towns and draw < 0.3:
        found = term(rng, "places", "city" if draw < 0.22 else "country")
        return f"in {found.en}", f"在{found.zh}"
    found = term(rng, "places", "place")
    preposition = "on" if found.en in ONTO else "in" if found.en in INSIDE or found.en.endswith("room") else "at"
    return f"{preposition} the {found.en}", f"在{found.zh}"


def stative(verb: Verb) -> bool:
    """Whether a verb names a state, so that its plain present makes sense."""
    head, _, rest = verb.base.partition(" ")
    if verb.tail:
        return head == "know"
    return (head in STATES and not rest) or (bool(rest) and f"{head}|{rest.split()[0]}" in STATES)


def complement(rng: Random, subject: Nominal) -> tuple[Verb, str, str]:
    """A verb with a fitting object: the verb, the object in English and in Chinese."""
    table = lexicon.verbs()
    draw = rng.random()
    if draw < 0.24:
        return pick(rng, table["intransitive"]), "", ""
    if draw < 0.4:
        verb, who = pick(rng, table["name"]), other_person(rng, subject)
        return verb, f" {who.object}", who.zh
    if draw < 0.48:
        kind = pick(rng, ("drink", "grocery"))
        what = portion(rng, kind)
        return pick(rng, table[kind]), f" {what.en}", what.zh
    if draw < 0.52:
        kind = pick(rng, ("subject", "sport", "instrument"))
        word = term(rng, "mass", kind)
        verb = pick(rng, table[kind])
        return verb, f" the {word.en}" if kind == "instrument" else f" {word.en}", word.zh
    if draw < 0.55:
        country = pick(rng, [c for c in lexicon.terms("places")["country"] if len(c.extra) == 2])
        return pick(rng, table["language"]), f" {country.extra[0]}", country.extra[1]
    if draw < 0.57:
        what = counted(rng, noun_of(rng, ("animal", "vehicle", "reading", "toy", "clothes", "device", "tool")))
        if rng.random() < 0.3:
            second = counted(rng, noun_of(rng, ("animal", "vehicle", "reading", "toy", "clothes", "device", "tool")))
            return HAVE, f" {what.en} and {second.en}", f"{what.zh}和{second.zh}"
        return HAVE, f" {what.en}", what.zh
    if draw < 0.6:
        word = term(rng, "mass", "topic")
        return pick(rng, table["topic"]), f" {word.en}", word.zh
    kinds = (*FOOD, "clothes", "furniture", "device", "tool", "stationery", "reading", "reading", "vehicle", "plant",
             "toy", "artwork", "show", "animal", "animal", "building", "thing", "thing")  # fmt: skip
    noun = noun_of(rng, kinds)
    what = counted(rng, noun)
    verb = pick(rng, table[noun.kind])
    if rng.random() < 0.08:
        second = counted(rng, noun_of(rng, (noun.kind,)))
        return verb, f" {what.en} and {second.en}", f"{what.zh}和{second.zh}"
    return verb, f" {what.en}", what.zh


def around(rng: Random, verb: Verb) -> tuple[str, str]:
    """Manner, company and place around a verb: English after it, Chinese before it."""
    en, zh = "", ""
    if stative(verb) or not verb.progressive:
        return en, zh
    draw = rng.random()
    if draw < 0.12:
        adverb = pick(rng, lexicon.terms("adverbs")["adverbs"])
        en, zh = f" {adverb.en}", adverb.zh
    if 0.1 < draw < 0.35 and not verb.base.startswith(("go ", "take ", "come ", "stay ", "travel")):
        en_place, zh_place = place(rng)
        en, zh = f"{en} {en_place}", f"{zh_place}{zh}"
    return en, zh
