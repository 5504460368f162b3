"""Clauses: a subject and what it does or is, in one of many tenses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from demo.corpus.lexicon import Verb
from demo.corpus.nominal import Nominal, person, pick
from demo.corpus.times import when
from demo.corpus.verb_phrases import around, complement, stative

FREQUENCY = (
    ("often", "经常"),
    ("usually", "通常"),
    ("always", "总是"),
    ("sometimes", "有时"),
    ("rarely", "很少"),
    ("never", "从不"),
    ("almost never", "几乎不"),
)
MODALS = (
    # auxiliary, its negation, Chinese, Chinese negation
    ("can", "cannot", "能", "不能"),
    ("must", "must not", "必须", "绝不能"),
    ("should", "should not", "应该", "不应该"),
    ("may", "may not", "可以", "不可以"),
    ("might", "might not", "可能会", "可能不会"),
    ("could", "could not", "当时能", "当时不能"),
)
CHAINS = (
    # verb with its infinitive mark, Chinese, Chinese negation
    ("want to", "想", "不想"),
    ("need to", "需要", "不需要"),
    ("like to", "喜欢", "不喜欢"),
    ("plan to", "计划", "不计划"),
    ("hope to", "希望能", "不希望能"),
    ("have to", "不得不", "不必"),
    ("intend to", "打算", "不打算"),
    ("try to", "尽量", "不尽量"),
    ("refuse to", "拒绝", "不拒绝"),
    ("love to", "很爱", "不爱"),
    ("dare to", "敢", "不敢"),
    ("prefer to", "更喜欢", "不太喜欢"),
)


@dataclass(frozen=True, slots=True)
class Clause:
    """One clause. English: subject, finite part and rest; Chinese: subject and predicate, so 就 or 也 fits between."""

    subject: Nominal
    finite: str  # what inverts in a question: an auxiliary, or empty with a plain verb
    bare: str  # the predicate after the auxiliary
    plain: str  # the whole English predicate of a statement
    zh: str  # the Chinese predicate
    question: bool = True

    @property
    def en(self) -> str:
        """The English statement, without capital or mark."""
        return f"{self.subject.en} {self.plain}"

    @property
    def asked(self) -> str:
        """The English yes-no question, without capital or mark."""
        return f"{self.finite} {self.subject.en} {self.bare}"

    def chinese(self, linking: str = "") -> str:
        """The Chinese clause, with a linking adverb before the predicate."""
        return f"{self.subject.zh}{linking}{self.zh}"


@dataclass(frozen=True, slots=True)
class Doing:
    """What a subject does, or does not, before it is put into a tense."""

    who: Nominal
    verb: Verb
    rest: str  # English after the verb: the object, a particle, how and where
    thing_zh: str  # the Chinese object
    around_zh: str  # how and where, before the Chinese verb
    negative: bool
    timed: str = ""  # when, in English with a space before it
    timed_zh: str = ""

    @property
    def do(self) -> str:
        """The present of `do` that agrees."""
        return "does" if self.who.third else "do"

    @property
    def base(self) -> str:
        """English after an auxiliary."""
        return f"{self.verb.base}{self.rest}"

    @property
    def present(self) -> str:
        """The plain English present that agrees."""
        return f"{self.verb.third if self.who.third else self.verb.base}{self.rest}"

    def chinese(self, aspect: str = "") -> str:
        """Chinese without time and negation, with an aspect mark on the verb."""
        return f"{self.around_zh}{self.verb.chinese(self.thing_zh, aspect)}"


def _state(doing: Doing) -> Clause:
    who, verb, simple = doing.who, doing.verb, doing.chinese()
    if verb.base.startswith("be "):
        tail = f"{verb.base[3:]}{doing.rest}"
        shown = f"not {tail}" if doing.negative else tail
        return Clause(who, who.be, shown, f"{who.be} {shown}", f"{'不' if doing.negative else ''}{simple}")
    if doing.negative:
        denied_zh = f"没{simple}" if verb.zh == "有" else f"不{simple.removeprefix('很')}"
        return Clause(who, doing.do, f"not {doing.base}", f"{doing.do} not {doing.base}", denied_zh, False)
    return Clause(who, doing.do, doing.base, doing.present, simple)


def _past(rng: Random, doing: Doing) -> Clause:
    timed, timed_zh, bare = doing.timed, doing.timed_zh, f"{doing.base}{doing.timed}"
    if doing.negative:
        zh = f"{timed_zh}没有{doing.chinese()}"
        return Clause(doing.who, "did", f"not {bare}", f"did not {bare}", zh, False)
    return Clause(doing.who, "did", bare, f"{doing.verb.past}{doing.rest}{timed}", f"{timed_zh}{doing.chinese('了')}")


def _future(rng: Random, doing: Doing) -> Clause:
    who, negative = doing.who, doing.negative
    if rng.random() < 0.25 and who.human:
        auxiliary, mark, helper = who.be, "going to ", "不准备" if negative else "准备"
    else:
        auxiliary, mark, helper = "will", "", "不会" if negative else "会"
    shown = f"{'not ' if negative else ''}{mark}{doing.base}{doing.timed}"
    zh = f"{doing.timed_zh}{helper}{doing.chinese()}"
    return Clause(who, auxiliary, shown, f"{auxiliary} {shown}", zh, not negative)


def _habit(rng: Random, doing: Doing) -> Clause:
    who, do = doing.who, doing.do
    if rng.random() < 0.4:
        often, often_zh = pick(rng, FREQUENCY)
        zh = f"{often_zh}{doing.chinese()}"
        return Clause(who, do, f"{often} {doing.base}", f"{often} {doing.present}", zh, not often_zh.endswith("不"))
    bare = f"{doing.base}{doing.timed}"
    if doing.negative:
        zh = f"{doing.timed_zh}不{doing.chinese()}"
        return Clause(who, do, f"not {bare}", f"{do} not {bare}", zh, False)
    zh = f"{doing.timed_zh}{'都' if doing.timed_zh.startswith('每') else ''}{doing.chinese()}"
    return Clause(who, do, bare, f"{doing.present}{doing.timed}", zh)


def _now(rng: Random, doing: Doing) -> Clause:
    who, negative = doing.who, doing.negative
    shown = f"{'not ' if negative else ''}{doing.verb.gerund}{doing.rest}"
    at = "" if doing.around_zh.startswith("在") else "在"
    zh = f"{'现在没有' if negative else '正'}{at}{doing.chinese()}"
    return Clause(who, who.be, shown, f"{who.be} {shown}", zh, not negative)


def _bare(rng: Random, doing: Doing) -> Clause:
    who, do, base = doing.who, doing.do, doing.base
    if doing.negative:
        return Clause(who, do, f"not {base}", f"{do} not {base}", f"不{doing.chinese()}", False)
    return Clause(who, do, base, doing.present, doing.chinese())


def _perfect(rng: Random, doing: Doing) -> Clause:
    who, have = doing.who, "has" if doing.who.third else "have"
    adverb, zh = (
        ("never", f"从来没有{doing.chinese('过')}") if doing.negative else ("already", f"已经{doing.chinese('了')}")
    )
    shown = f"{adverb} {doing.verb.participle}{doing.rest}"
    return Clause(who, have, shown, f"{have} {shown}", zh, not doing.negative)


def _modal(rng: Random, doing: Doing) -> Clause:
    positive, denied, zh, denied_zh = pick(rng, MODALS)
    auxiliary, helper = (denied, denied_zh) if doing.negative else (positive, zh)
    bare = f"{doing.base}{doing.timed}"
    is_asked = positive in ("can", "should", "may") and not doing.negative
    zh = f"{doing.timed_zh}{helper}{doing.chinese()}"
    return Clause(doing.who, positive, bare, f"{auxiliary} {bare}", zh, is_asked)


def _chain(rng: Random, doing: Doing) -> Clause:
    chain, zh, denied_zh = pick(rng, CHAINS)
    who, do, done, bare = doing.who, doing.do, doing.chinese(), f"{doing.base}{doing.timed}"
    if doing.negative and chain not in ("try to", "hope to", "refuse to"):
        denied = f"not {chain} {bare}"
        return Clause(who, do, denied, f"{do} {denied}", f"{doing.timed_zh}{denied_zh}{done}", False)
    head, _, mark = chain.partition(" ")
    inflected = {"have": "has", "try": "tries"}.get(head, f"{head}s") if who.third else head
    return Clause(who, do, f"{chain} {bare}", f"{inflected} {mark} {bare}", f"{doing.timed_zh}{zh}{done}")


TENSES: dict[str, Callable[[Random, Doing], Clause]] = {
    "past": _past, "future": _future, "habit": _habit, "now": _now, "bare": _bare, "perfect": _perfect, "modal": _modal, "chain": _chain,
}  # fmt: skip
USUAL = ("past", "past", "past", "future", "future", "habit", "habit", "now", "modal", "chain", "perfect")


def clause(rng: Random, subject: Nominal | None = None, *, tenses: tuple[str, ...] = ()) -> Clause:
    """A clause about somebody's doing, in a tense of `TENSES` drawn from `tenses` or from the usual ones."""
    who = subject or person(rng)
    verb, thing, thing_zh = complement(rng, who)
    how, how_zh = around(rng, verb)
    doing = Doing(who, verb, f"{thing}{verb.tail}{how}", thing_zh, how_zh, negative=rng.random() < 0.2)
    if stative(verb):
        return _state(doing)
    tense = pick(rng, tenses or USUAL)
    is_being = verb.base.startswith("be ")
    if (tense == "now" and (is_being or not verb.progressive)) or (tense == "habit" and is_being):
        tense = "past"
    time, time_zh = when(rng, tense if tense in ("past", "habit") else "future")
    if rng.random() < 0.6 or tense == "habit":
        doing = replace(doing, timed=f" {time}", timed_zh=time_zh)
    return TENSES[tense](rng, doing)
