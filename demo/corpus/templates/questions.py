"""Questions: whether, why, where, who, what, which and how many."""

from __future__ import annotations

from random import Random

from demo.corpus import lexicon
from demo.corpus.clauses import clause
from demo.corpus.nominal import GOODS, noun_of, person, pick, something, term
from demo.corpus.templates.doings import statement
from demo.corpus.templates.said import Said
from demo.corpus.times import when
from demo.corpus.verb_phrases import complement, stative


def negated_or_asked(rng: Random) -> Said:
    for _ in range(10):
        one = clause(rng)
        if one.question:
            return f"{one.asked}?", f"{one.chinese()}吗？"
    return f"{one.en}.", f"{one.chinese()}。"


def wh_question(rng: Random) -> Said:  # noqa: C901 - a table of questions
    draw = rng.random()
    if draw < 0.25:
        one = clause(rng, tenses=("past", "future", "modal"))
        if one.question:
            if rng.random() < 0.5:
                return f"why {one.asked}?", f"{one.chinese('为什么')}？"
            return f"how {one.asked}?", f"{one.chinese('怎么')}？"
        return f"why {one.finite} {one.subject.en} {one.bare}?" if one.finite else "why?", f"{one.chinese('为什么')}？"
    who = person(rng)
    do = "does" if who.third else "do"
    verb, thing, thing_zh = complement(rng, who)
    if draw < 0.45:
        doing = pick(rng, lexicon.verbs()["intransitive"])
        if rng.random() < 0.5:
            return f"where {do} {who.en} usually {doing.base}?", f"{who.zh}通常在哪里{doing.zh}？"
        return f"when will {who.en} {doing.base}?", f"{who.zh}什么时候会{doing.zh}？"
    if draw < 0.6:
        time, time_zh = when(rng, "past")
        doer = pick(rng, lexicon.verbs()[pick(rng, GOODS)])
        if stative(doer) or "……" in doer.zh:
            return statement(rng)
        return f"what did {who.en} {doer.base}{doer.tail} {time}?", f"{who.zh}{time_zh}{doer.zh}了什么？"
    if draw < 0.75 and not stative(verb) and verb.progressive:
        return f"who is {verb.gerund}{thing}{verb.tail}?", f"谁正在{verb.chinese(thing_zh)}？"
    if draw < 0.85:
        noun = noun_of(rng, GOODS)
        if rng.random() < 0.5:
            return f"how many {noun.plural} {do} {who.en} need?", f"{who.zh}需要多少{noun.measure}{noun.zh}？"
        return f"how many {noun.plural} did {who.en} buy?", f"{who.zh}买了多少{noun.measure}{noun.zh}？"
    what = something(rng, definite=True)
    if draw < 0.92 and not what.many:
        return f"where is {what.en}?", f"{what.zh}在哪里？"
    if draw < 0.96:
        noun = noun_of(rng, GOODS)
        return f"which {noun.en} {do} {who.en} want?", f"{who.zh}想要哪{noun.measure}{noun.zh}？"
    where = term(rng, "places", "place")
    return f"how do I get to the {where.en}?", f"去{where.zh}怎么走？"
