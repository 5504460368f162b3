"""What somebody or something is like, and more so than another."""

from __future__ import annotations

from random import Random

from demo.corpus import lexicon
from demo.corpus.morphology import article
from demo.corpus.nominal import (
    THINGS,
    Nominal,
    attributive,
    counted,
    fitting,
    noun_of,
    other_person,
    person,
    pick,
    possessor,
    something,
    term,
)
from demo.corpus.templates.said import Said
from demo.corpus.times import when
from demo.corpus.verb_phrases import stative

DEGREES = (("very", "非常", ""), ("too", "太", "了"), ("really", "真", ""), ("quite", "相当", ""), ("a little", "有点儿", ""),
           ("so", "这么", ""), ("extremely", "极其", ""), ("", "很", ""), ("", "很", ""), ("not", "不", ""), ("not very", "不太", ""))  # fmt: skip


def predicate(
    rng: Random, kind: str, subject: Nominal, verb: str = "", time: tuple[str, str] = ("", "")
) -> tuple[str, str]:
    """A predicate of quality: `is very tall` 非常高."""
    table = lexicon.adjectives()
    for _ in range(20):
        word = (
            pick(rng, table["person"])
            if kind == "person"
            else pick(rng, table["place"])
            if kind == "place"
            else fitting(rng, kind)
        )
        if word.predicative and word.kind not in ("origin",):
            break
    else:
        word = table["thing"][0]
    after, timed = (f" {time[0]}", time[1]) if time[0] else ("", "")
    be = verb or subject.be
    if word.kind == "color":
        if rng.random() < 0.15:
            return f"{be} not {word.en}{after}", f"{timed}不是{word.zh}的"
        return f"{be} {word.en}{after}", f"{timed}是{word.zh}的"
    degree, before, mark = pick(rng, DEGREES)
    return f"{be} {degree + ' ' if degree else ''}{word.en}{after}", f"{timed}{before}{word.zh}{mark}"


def quality(rng: Random) -> Said:
    draw = rng.random()
    if draw < 0.45:
        who = person(rng)
        when_ = when(rng, "past") if rng.random() < 0.2 else ("", "")
        en, zh = predicate(rng, "person", who, who.was if when_[0] else "", when_)
        return f"{who.en} {en}.", f"{who.zh}{zh}。"
    if draw < 0.6:
        where = pick(rng, lexicon.terms("places")["place"][:32] + lexicon.terms("places")["city"])
        subject = Nominal(where.en if where.kind == "city" else f"the {where.en}", where.zh)
        en, zh = predicate(rng, "place", subject)
        return f"{subject.en} {en}.", f"{subject.zh}{zh}。"
    what = something(rng, definite=True)
    en, zh = predicate(rng, what.kind, what)
    return f"{what.en} {en}.", f"{what.zh}{zh}。"


def quality_question(rng: Random) -> Said:
    who, kind = (person(rng), "person") if rng.random() < 0.5 else (something(rng, definite=True), "")
    words = lexicon.adjectives()["person"] if kind else (fitting(rng, who.kind),)
    word = pick(rng, words)
    if not word.predicative or word.kind in ("color", "origin"):
        return quality(rng)
    return f"{who.be} {who.en} {word.en}?", f"{who.zh}{word.zh}吗？"


def comparison(rng: Random) -> Said:
    if rng.random() < 0.5:
        one = person(rng)
        other = other_person(rng, one)
        word = pick(rng, lexicon.adjectives()["person"])
        be, second = one.be, other.object if other.person < 3 or other.many or other.objective else other.en
    else:
        noun = noun_of(rng, THINGS)
        adjectives = [
            a
            for a in (fitting(rng, noun.kind) for _ in range(8))
            if a.predicative and a.kind not in ("color", "origin")
        ]
        if not adjectives:
            return comparison(rng)
        word = adjectives[0]
        owners = [possessor(rng), possessor(rng)]
        if owners[0] == owners[1]:
            return comparison(rng)
        one = Nominal(f"{owners[0][0]} {noun.en}", f"{owners[0][1]}的{noun.zh}")
        other = Nominal(f"{owners[1][0]} {noun.en}", f"{owners[1][1]}的{noun.zh}")
        be, second = one.be, other.en
    draw = rng.random()
    if draw < 0.5:
        return f"{one.en} {be} {word.comparative} than {second}.", f"{one.zh}比{other.zh}{word.zh}。"
    if draw < 0.7:
        return f"{one.en} {be} much {word.comparative} than {second}.", f"{one.zh}比{other.zh}{word.zh}得多。"
    if draw < 0.85:
        return f"{one.en} {be} as {word.en} as {second}.", f"{one.zh}和{other.zh}一样{word.zh}。"
    return f"{one.en} {be} not as {word.en} as {second}.", f"{one.zh}没有{other.zh}那么{word.zh}。"


def relative_clause(rng: Random) -> Said:
    who = person(rng)
    for _ in range(30):
        noun = noun_of(rng, THINGS)
        verb = pick(rng, lexicon.verbs()[noun.kind])
        if not stative(verb) and "……" not in verb.zh:
            break
    time, time_zh = when(rng, "past")
    subject = Nominal(
        f"the {noun.en} that {who.en} {verb.past}{verb.tail} {time}",
        f"{who.zh}{time_zh}{verb.zh}的那{noun.measure}{noun.zh}",
        kind=noun.kind,
    )
    if rng.random() < 0.3:
        return f"where is {subject.en}?", f"{subject.zh}在哪里？"
    en, zh = predicate(rng, noun.kind, subject)
    return f"{subject.en} {en}.", f"{subject.zh}{zh}。"


def material(rng: Random) -> Said:
    what = counted(rng, noun_of(rng, ("furniture", "tool", "toy", "clothes")), definite=True)
    stuff = term(rng, "mass", "stuff")
    if rng.random() < 0.7:
        return f"{what.en} {what.be} made of {stuff.en}.", f"{what.zh}是{stuff.zh}做的。"
    return f"{what.be} {what.en} made of {stuff.en}?", f"{what.zh}是{stuff.zh}做的吗？"


def general_truth(rng: Random) -> Said:
    topics = lexicon.terms("mass")["topic"] + lexicon.terms("mass")["subject"]
    one, other = pick(rng, topics), pick(rng, topics)
    word = pick(
        rng, [a for a in lexicon.adjectives()["abstract"] + lexicon.adjectives()["reading"][:8] if a.predicative]
    )
    draw = rng.random()
    if draw < 0.35 or one is other:
        degree, before, mark = pick(rng, DEGREES)
        return f"{one.en} is {degree + ' ' if degree else ''}{word.en}.", f"{one.zh}{before}{word.zh}{mark}。"
    if draw < 0.55:
        return f"{one.en} is {word.comparative} than {other.en}.", f"{one.zh}比{other.zh}{word.zh}。"
    if draw < 0.7:
        return f"{one.en} and {other.en} are equally {word.en}.", f"{one.zh}和{other.zh}同样{word.zh}。"
    if draw < 0.85:
        return f"without {one.en} there is no {other.en}.", f"没有{one.zh}就没有{other.zh}。"
    return f"this book is about {one.en} and {other.en}.", f"这本书是关于{one.zh}和{other.zh}的。"


def exclamation(rng: Random) -> Said:
    noun = noun_of(rng, (*THINGS, "thing", "building"))
    word = fitting(rng, noun.kind)
    if not word.predicative or word.kind in ("color", "origin"):
        return exclamation(rng)
    if rng.random() < 0.5:
        return f"what {article(word.en)} {word.en} {noun.en}!", f"多么{word.zh}的{noun.zh}啊！"
    return f"this is {article(word.en)} {word.en} {noun.en}.", f"这是一{noun.measure}{attributive(word)}{noun.zh}。"
