"""What people tell of themselves and each other: names, homes, age, jobs, families, languages, health."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from demo.corpus import lexicon
from demo.corpus.lexicon import Term
from demo.corpus.morphology import article, chinese, spelled
from demo.corpus.nominal import POSSESSIVES, Nominal, name, person, pick, term
from demo.corpus.templates.said import Said
from demo.corpus.times import span

BODY_HURT = (
    "head",
    "back",
    "stomach",
    "throat",
    "knee",
    "shoulder",
    "foot",
    "hand",
    "leg",
    "arm",
    "neck",
    "tooth",
    "ear",
    "ankle",
    "wrist",
)


@dataclass(frozen=True, slots=True)
class Someone:
    """Of whom something is told; `single` is somebody who is not several."""

    who: Nominal
    single: Nominal
    home: Term  # a city or a country

    @property
    def have(self) -> str:
        """The present of `have` that agrees."""
        return "has" if self.who.third else "have"


def _name(rng: Random, someone: Someone) -> Said:
    my, mine = pick(rng, POSSESSIVES)
    called = name(rng)
    if my in ("our", "their"):
        return f"{my} teacher's name is {called.en}.", f"{mine}的老师叫{called.zh}。"
    return f"{my} name is {called.en}.", f"{mine}的名字叫{called.zh}。" if my != "my" else f"我叫{called.zh}。"


def _origin(rng: Random, someone: Someone) -> Said:
    who, home = someone.who, someone.home
    return f"{who.en} {who.be} from {home.en}.", f"{who.zh}来自{home.zh}。"


def _residence(rng: Random, someone: Someone) -> Said:
    who, home = someone.who, someone.home
    verb = "lives" if who.third else "live"
    return f"{who.en} {verb} in {home.en}.", f"{who.zh}住在{home.zh}。"


def _years_there(rng: Random, someone: Someone) -> Said:
    who, home = someone.who, someone.home
    years = span(rng)
    return f"{who.en} {someone.have} lived in {home.en} for {years[0]}.", f"{who.zh}在{home.zh}住了{years[1]}了。"


def _birth(rng: Random, someone: Someone) -> Said:
    who, home = someone.who, someone.home
    if rng.random() < 0.5:
        year = rng.randint(1930, 2020)
        return f"{who.en} {who.was} born in {year}.", f"{who.zh}出生于{year}年。"
    return f"{who.en} {who.was} born in {home.en}.", f"{who.zh}出生在{home.zh}。"


def _age(rng: Random, someone: Someone) -> Said:
    who = someone.who
    age = rng.randint(3, 20) if rng.random() < 0.5 else rng.randint(21, 99)
    return f"{who.en} {who.be} {spelled(age)} years old.", f"{who.zh}{chinese(age, counting=False)}岁。"


def _job(rng: Random, someone: Someone) -> Said:
    who = someone.who
    job = pick(rng, lexicon.nouns("people")["job"] + lexicon.nouns("people")["role"][:1])
    mode = rng.random()
    if who.many:
        return f"{who.en} are {job.plural}.", f"{who.zh}是{job.zh}。"
    if mode < 0.5:
        return f"{who.en} {who.be} {article(job.en)} {job.en}.", f"{who.zh}是{job.zh}。"
    if mode < 0.65:
        return f"{who.en} {who.be} not {article(job.en)} {job.en}.", f"{who.zh}不是{job.zh}。"
    if mode < 0.8:
        return f"{who.be} {who.en} {article(job.en)} {job.en}?", f"{who.zh}是{job.zh}吗？"
    want = "wants" if who.third else "want"
    return f"{who.en} {want} to become {article(job.en)} {job.en}.", f"{who.zh}想当{job.zh}。"


def _family(rng: Random, someone: Someone) -> Said:
    who = someone.who
    number, family = rng.randint(2, 9), pick(rng, lexicon.nouns("people")["family"])
    return f"{who.en} {someone.have} {spelled(number)} {family.plural}.", f"{who.zh}有{chinese(number)}个{family.zh}。"


def _languages(rng: Random, someone: Someone) -> Said:
    who = someone.who
    countries = lexicon.terms("places")["country"]
    first, second = (pick(rng, [c for c in countries if len(c.extra) == 2]) for _ in range(2))
    verb = "speaks" if who.third else "speak"
    if first is second:
        return f"{who.en} {verb} {first.extra[0]}.", f"{who.zh}会说{first.extra[1]}。"
    return (
        f"{who.en} {verb} {first.extra[0]} and {second.extra[0]}.",
        f"{who.zh}会说{first.extra[1]}和{second.extra[1]}。",
    )


def _illness(rng: Random, someone: Someone) -> Said:
    who = someone.single
    illness = term(rng, "mass", "illness")
    have = "has" if who.third else "have"
    caught = "得了" if illness.zh in ("感冒", "过敏") else ""
    return f"{who.en} {have} {article(illness.en)} {illness.en}.", f"{who.zh}{caught}{illness.zh}。"


def _pain(rng: Random, someone: Someone) -> Said:
    part = pick(rng, BODY_HURT)
    body = next(noun for noun in lexicon.nouns()["body"] if noun.en == part)
    my, mine = pick(rng, POSSESSIVES)
    if my in ("our", "their"):
        my, mine = "my", "我"
    return f"{my} {part} hurts.", f"{mine}的{body.zh}疼。"


Fact = Callable[[Random, Someone], Said]
FACTS: tuple[tuple[float, Fact], ...] = (
    (0.1, _name), (0.2, _origin), (0.3, _residence), (0.38, _years_there), (0.46, _birth), (0.56, _age), (0.72, _job), (0.8, _family),
    (0.88, _languages), (0.94, _illness), (1.0, _pain),
)  # fmt: skip
"""Below which draw a fact is told: those before it have the draws below."""


def about_oneself(rng: Random) -> Said:
    """One fact of somebody."""
    who = person(rng)
    single = who if not who.many else name(rng)
    places = lexicon.terms("places")
    draw = rng.random()
    city, country = pick(rng, places["city"]), pick(rng, places["country"])
    someone = Someone(who, single, home=pick(rng, (city, country)))
    return next(fact for below, fact in FACTS if draw < below)(rng, someone)
