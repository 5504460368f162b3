"""Noun phrases: who and what a sentence is about, in both languages from one choice."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TypeVar

from demo.corpus import lexicon
from demo.corpus.lexicon import Adjective, Noun, Term
from demo.corpus.morphology import article, chinese, spelled

T = TypeVar("T")

GOODS = ("fruit", "vegetable", "snack", "clothes", "furniture", "device", "tool", "stationery", "reading")
THINGS = (*GOODS, "vehicle", "plant", "toy", "artwork", "animal")
BARE = frozenset("大小新旧长短圆方胖坏")
FOOD = ("fruit", "vegetable", "snack")
POSSESSIVES = (("my", "我"), ("your", "你"), ("his", "他"), ("her", "她"), ("our", "我们"), ("their", "他们"))
SYLLABLES = "ka zor mi len vo ra tis bel no dar shi fu wen gal ti ro ven pas lu mar ke san jo bri el ta quin".split()


@dataclass(frozen=True, slots=True)
class Nominal:
    """A noun phrase; `person` is 1, 2 or 3 and `objective` the form after a verb."""

    en: str
    zh: str
    person: int = 3
    many: bool = False
    objective: str = ""
    human: bool = False
    kind: str = ""

    @property
    def be(self) -> str:
        """The present of `be` that agrees."""
        if self.many or self.person == 2:
            return "are"
        return "am" if self.person == 1 else "is"

    @property
    def was(self) -> str:
        """The past of `be` that agrees."""
        return "were" if self.many or self.person == 2 else "was"

    @property
    def third(self) -> bool:
        """Whether the verb takes an -s."""
        return self.person == 3 and not self.many

    @property
    def object(self) -> str:
        """The English form in object position."""
        return self.objective or self.en


PRONOUNS = (
    Nominal("I", "我", 1, False, "me", True),
    Nominal("you", "你", 2, False, "you", True),
    Nominal("he", "他", 3, False, "him", True),
    Nominal("she", "她", 3, False, "her", True),
    Nominal("we", "我们", 1, True, "us", True),
    Nominal("they", "他们", 3, True, "them", True),
)


def pick(rng: Random, items: tuple[T, ...] | list[T]) -> T:
    """One of the items, all alike in chance."""
    return items[int(rng.random() * len(items))]


def invented_name(rng: Random) -> str:
    """A name nobody bears, so that unknown names are copied rather than guessed."""
    return "".join(pick(rng, SYLLABLES) for _ in range(rng.randint(2, 3))).capitalize()


def name(rng: Random) -> Nominal:
    """A person's name; one in twelve is invented and stays in Latin letters."""
    if rng.random() < 0.08:
        word = invented_name(rng)
        return Nominal(word, word, human=True)
    people = lexicon.terms("people")
    term = pick(rng, people["name-f"] if rng.random() < 0.5 else people["name-m"])
    return Nominal(term.en, term.zh, human=True)


def possessor(rng: Random) -> tuple[str, str]:
    """`my` and 我, or `Anna's` and 安娜."""
    if rng.random() < 0.75:
        return pick(rng, POSSESSIVES)
    owner = name(rng)
    return f"{owner.en}'s", owner.zh


def relative(rng: Random) -> Nominal:
    """A member of somebody's family: `my mother`, 我妈妈; `Anna's mother`, 安娜的妈妈."""
    en, zh = possessor(rng)
    word = pick(rng, lexicon.nouns("people")["family"])
    link = "的" if en.endswith("'s") or len(word.zh) > 2 else ""
    return Nominal(f"{en} {word.en}", f"{zh}{link}{word.zh}", human=True)


def professional(rng: Random) -> Nominal:
    """`the teacher`, `that doctor`, `two nurses`, `our boss`."""
    people = lexicon.nouns("people")
    word = pick(rng, people["job"] + people["role"])
    draw = rng.random()
    if draw < 0.45:
        return Nominal(f"the {word.en}", word.zh, human=True)
    if draw < 0.6:
        return Nominal(f"that {word.en}", f"那{word.measure}{word.zh}", human=True)
    if draw < 0.75:
        return Nominal(f"this {word.en}", f"这{word.measure}{word.zh}", human=True)
    if draw < 0.88:
        number = rng.randint(2, 12)
        return Nominal(
            f"{spelled(number)} {word.plural}", f"{chinese(number)}{word.measure}{word.zh}", many=True, human=True
        )
    return Nominal(f"many {word.plural}", f"很多{word.zh}", many=True, human=True)


def person(rng: Random) -> Nominal:
    """Anybody: a pronoun, a name, a relative, a professional or two of them."""
    draw = rng.random()
    if draw < 0.4:
        return pick(rng, PRONOUNS)
    if draw < 0.6:
        return name(rng)
    if draw < 0.77:
        return relative(rng)
    if draw < 0.95:
        return professional(rng)
    first, second = name(rng), name(rng)
    return Nominal(f"{first.en} and {second.en}", f"{first.zh}和{second.zh}", many=True, human=True)


def other_person(rng: Random, subject: Nominal) -> Nominal:
    """Somebody who is not the subject."""
    for _ in range(20):
        found = person(rng)
        same = found.person == subject.person and subject.person < 3
        if not same and found.zh not in subject.zh and subject.zh not in found.zh:
            return found
    return name(rng)


def attributive(word: Adjective) -> str:
    """A Chinese adjective before its noun: 大, 红色的, 二手."""
    return word.zh if word.kind == "origin" or word.zh in BARE else f"{word.zh}的"


def fitting(rng: Random, kind: str) -> Adjective:
    """An adjective that suits a class of noun."""
    table = lexicon.adjectives()
    if kind in FOOD:
        return pick(rng, table["food"])
    if kind in ("reading", "show", "artwork"):
        return pick(rng, table["reading"])
    if kind == "animal":
        return pick(rng, table["animal"] + table["color"][:8])
    if kind == "plant":
        return pick(rng, table["thing"][:11] + table["color"][:9])
    if kind == "thing":
        return pick(rng, table["abstract"])
    if kind == "building":
        return pick(rng, table["thing"][:5] + table["color"][:9] + table["thing"][-8:-3])
    draw = rng.random()
    return pick(rng, table["thing" if draw < 0.5 else "color" if draw < 0.85 else "origin"])


def noun_of(rng: Random, kinds: tuple[str, ...]) -> Noun:
    """A countable noun of one of the classes."""
    return pick(rng, lexicon.nouns()[pick(rng, kinds)])


def counted(  # noqa: C901, PLR0912 - a table of determiners
    rng: Random, word: Noun, *, definite: bool = False
) -> Nominal:
    """A noun with determiner, measure word and perhaps adjectives: `my two red apples`."""
    describing: list[Adjective] = []
    if rng.random() < 0.35:
        describing.append(fitting(rng, word.kind))
        color = pick(rng, lexicon.adjectives()["color"])
        if describing[0].kind == "thing" and word.kind != "building" and rng.random() < 0.2:
            describing.append(color)
    adjective = "".join(f"{a.en} " for a in describing)
    if len(describing) == 2:
        described = f"{describing[0].zh}的{describing[1].zh}"
    else:
        described = "".join(attributive(a) for a in describing)
    one, several = f"{adjective}{word.en}", f"{adjective}{word.plural}"
    draw = rng.random() if not definite else 0.42 + 0.45 * rng.random()
    number = rng.randint(2, 12) if rng.random() < 0.75 else rng.randint(13, 300)
    kind = word.kind
    if draw < 0.26:
        return Nominal(f"{article(one)} {one}", f"一{word.measure}{described}{word.zh}", kind=kind)
    if draw < 0.42:
        text = f"{chinese(number)}{word.measure}{described}{word.zh}"
        return Nominal(f"{spelled(number)} {several}", text, many=True, kind=kind)
    if draw < 0.5:
        return Nominal(f"this {one}", f"这{word.measure}{described}{word.zh}", kind=kind)
    if draw < 0.58:
        return Nominal(f"that {one}", f"那{word.measure}{described}{word.zh}", kind=kind)
    if draw < 0.63:
        return Nominal(f"these {several}", f"这些{described}{word.zh}", many=True, kind=kind)
    if draw < 0.67:
        return Nominal(f"those {several}", f"那些{described}{word.zh}", many=True, kind=kind)
    if draw < 0.87:
        en, zh = possessor(rng)
        if rng.random() < 0.2:
            text = f"{zh}的{chinese(number)}{word.measure}{described}{word.zh}"
            return Nominal(f"{en} {spelled(number)} {several}", text, many=True, kind=kind)
        return Nominal(f"{en} {one}", f"{zh}的{described}{word.zh}", kind=kind)
    if draw < 0.94:
        return Nominal(f"some {several}", f"一些{described}{word.zh}", many=True, kind=kind)
    return Nominal(f"many {several}", f"很多{described}{word.zh}", many=True, kind=kind)


def something(rng: Random, *, definite: bool = False) -> Nominal:
    """Something countable, with its determiner."""
    return counted(rng, noun_of(rng, THINGS), definite=definite)


CONTAINERS = {
    "cup": ("cups", "杯"),
    "bottle": ("bottles", "瓶"),
    "glass": ("glasses", "玻璃杯"),
    "bowl": ("bowls", "碗"),
    "plate": ("plates", "盘"),
    "kilo": ("kilos", "公斤"),
    "bag": ("bags", "袋"),
    "box": ("boxes", "盒"),
}


def portion(rng: Random, kind: str) -> Nominal:
    """Something uncountable in a container, `two cups of coffee`, or bare, `coffee`."""
    word = pick(rng, lexicon.terms("mass")[kind])
    draw = rng.random()
    if draw < 0.25:
        return Nominal(word.en, word.zh, kind=kind)
    if draw < 0.35:
        return Nominal(f"some {word.en}", f"一些{word.zh}", kind=kind)
    container = pick(rng, lexicon.containers()[kind])
    many, measure = CONTAINERS[container]
    if draw < 0.65:
        return Nominal(f"a {container} of {word.en}", f"一{measure}{word.zh}", kind=kind)
    number = rng.randint(2, 20)
    return Nominal(
        f"{spelled(number)} {many} of {word.en}", f"{chinese(number)}{measure}{word.zh}", many=True, kind=kind
    )


def term(rng: Random, name_: str, kind: str) -> Term:
    """A word of a class without inflection."""
    return pick(rng, lexicon.terms(name_)[kind])
