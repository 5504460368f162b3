"""Clauses: a subject, a verb phrase in one of many tenses, and where, when and how."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from demo.corpus import lexicon
from demo.corpus.lexicon import Verb
from demo.corpus.morphology import chinese, spelled
from demo.corpus.nominal import FOOD, Nominal, counted, noun_of, other_person, person, pick, portion, term

WEEKDAYS = tuple(zip("Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split(), "一二三四五六日", strict=True))
MONTHS = "January February March April May June July August September October November December".split()
SPANS = (("day", "天"), ("week", "个星期"), ("month", "个月"), ("year", "年"), ("hour", "个小时"), ("minute", "分钟"))
PAST = (
    ("yesterday", "昨天"),
    ("last night", "昨晚"),
    ("last week", "上周"),
    ("last month", "上个月"),
    ("last year", "去年"),
    ("this morning", "今天早上"),
    ("yesterday morning", "昨天早上"),
    ("yesterday afternoon", "昨天下午"),
    ("the day before yesterday", "前天"),
    ("just now", "刚才"),
    ("last weekend", "上个周末"),
    ("last summer", "去年夏天"),
    ("last winter", "去年冬天"),
    ("yesterday evening", "昨天傍晚"),
)
FUTURE = (
    ("tomorrow", "明天"),
    ("tonight", "今晚"),
    ("next week", "下周"),
    ("next month", "下个月"),
    ("next year", "明年"),
    ("tomorrow morning", "明天早上"),
    ("tomorrow afternoon", "明天下午"),
    ("the day after tomorrow", "后天"),
    ("soon", "很快"),
    ("next weekend", "下个周末"),
    ("next summer", "明年夏天"),
    ("later", "以后"),
    ("tomorrow evening", "明天晚上"),
)
HABIT = (
    ("every day", "每天"),
    ("every morning", "每天早上"),
    ("every evening", "每天晚上"),
    ("every week", "每周"),
    ("every month", "每个月"),
    ("every year", "每年"),
    ("on weekends", "周末"),
    ("every weekend", "每个周末"),
    ("every afternoon", "每天下午"),
    ("twice a week", "每周两次"),
    ("once a month", "每月一次"),
    ("in summer", "夏天"),
    ("in winter", "冬天"),
)
FREQUENCY = (
    ("often", "经常"),
    ("usually", "通常"),
    ("always", "总是"),
    ("sometimes", "有时"),
    ("rarely", "很少"),
    ("never", "从不"),
    ("almost never", "几乎不"),
)
DAYPARTS = (("in the morning", "早上"), ("in the afternoon", "下午"), ("in the evening", "晚上"))
STATES = frozenset(
    "like need want own know love hate trust miss remember respect admire envy believe have understand value "
    "know|a lot about care|about believe|in be|good be|interested".split()
)
INSIDE = frozenset(
    "park kitchen garden village forest mountains bedroom bathroom classroom laboratory library museum office "
    "restaurant hotel hospital supermarket café bar gallery studio courtroom basement dormitory teahouse warehouse".split()
)
ONTO = frozenset(("beach", "square", "playground", "farm", "balcony"))
PERSONAL = ("job", "role", "family", "name")
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


HAVE = Verb("have", "had", "had", "", "有", False)


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


def clock(rng: Random) -> tuple[str, str]:
    """A time of day: `half past three` 三点半."""
    hour, draw = rng.randint(1, 12), rng.random()
    if draw < 0.35:
        return f"{spelled(hour)} o'clock", f"{chinese(hour)}点"
    if draw < 0.6:
        return f"half past {spelled(hour)}", f"{chinese(hour)}点半"
    if draw < 0.72:
        return f"a quarter past {spelled(hour)}", f"{chinese(hour)}点一刻"
    if draw < 0.82:
        return f"a quarter to {spelled(hour)}", f"差一刻{chinese(hour)}点"
    minute = rng.randint(1, 59)
    return f"{hour}:{minute:02d}", f"{hour}点{minute:02d}分"


def date(rng: Random) -> tuple[str, str]:
    """A day of the year: `May 3` 5月3日."""
    month = rng.randint(1, 12)
    day = rng.randint(1, 28)
    return f"{MONTHS[month - 1]} {day}", f"{month}月{day}日"


def span(rng: Random) -> tuple[str, str]:
    """A length of time: `two weeks` 两个星期."""
    number = rng.randint(2, 20) if rng.random() < 0.9 else rng.randint(21, 90)
    en, zh = pick(rng, SPANS)
    return f"{spelled(number)} {en}s", f"{chinese(number)}{zh}"


def _at_clock(rng: Random) -> tuple[str, str]:
    en, zh = clock(rng)
    if rng.random() < 0.4 and ":" not in en and not zh.startswith("差"):
        part, part_zh = pick(rng, DAYPARTS)
        return f"at {en} {part}", f"{part_zh}{zh}"
    return f"at {en}", zh


def when(rng: Random, tense: str) -> tuple[str, str]:
    """A time that suits a tense: English for the end, Chinese for after the subject."""
    draw = rng.random()
    if tense == "habit":
        if draw < 0.6:
            return pick(rng, HABIT)
        if draw < 0.8:
            day, zh = pick(rng, WEEKDAYS)
            return f"every {day}", f"每个星期{zh}"
        en, zh = _at_clock(rng)
        return f"every day {en}", f"每天{zh}"
    if draw < 0.55:
        return pick(rng, PAST if tense == "past" else FUTURE)
    if draw < 0.7:
        day, zh = pick(rng, WEEKDAYS)
        word, mark = ("last", "上") if tense == "past" else ("next", "下")
        return f"{word} {day}", f"{mark}周{zh}"
    if draw < 0.8:
        en, zh = span(rng)
        return (f"{en} ago", f"{zh}前") if tense == "past" else (f"in {en}", f"{zh}后")
    if draw < 0.88:
        en, zh = date(rng)
        return f"on {en}", zh
    if draw < 0.94 and tense == "past":
        year = rng.randint(1950, 2024)
        return f"in {year}", f"{year}年"
    day, day_zh = ("yesterday", "昨天") if tense == "past" else ("tomorrow", "明天")
    en, zh = _at_clock(rng)
    return f"{day} {en}", f"{day_zh}{zh}"


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


def _around(rng: Random, verb: Verb) -> tuple[str, str]:
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


def clause(  # noqa: C901, PLR0912, PLR0915 - a table of tenses
    rng: Random, subject: Nominal | None = None, *, tenses: tuple[str, ...] = ()
) -> Clause:
    """A clause about somebody's doing, in a tense drawn from `tenses` or from all."""
    who = subject or person(rng)
    verb, thing, thing_zh = complement(rng, who)
    around, around_zh = _around(rng, verb)
    rest = f"{thing}{verb.tail}{around}"
    simple = verb.chinese(thing_zh)
    negative = rng.random() < 0.2
    if stative(verb):
        if verb.base.startswith("be "):
            tail = f"{verb.base[3:]}{rest}"
            shown = f"not {tail}" if negative else tail
            return Clause(who, who.be, shown, f"{who.be} {shown}", f"{'不' if negative else ''}{simple}")
        do = "does" if who.third else "do"
        denied = simple.removeprefix("很") if simple.startswith("很") else simple
        denied_zh = f"没{denied}" if verb.zh == "有" else f"不{denied}"
        base = f"{verb.base}{rest}"
        if negative:
            return Clause(who, do, f"not {base}", f"{do} not {base}", denied_zh, False)
        return Clause(who, do, base, f"{verb.third if who.third else verb.base}{rest}", simple)
    tense = pick(
        rng,
        tenses or ("past", "past", "past", "future", "future", "habit", "habit", "now", "modal", "chain", "perfect"),
    )
    if tense == "now" and not verb.progressive:
        tense = "past"
    if tense in ("habit", "now") and verb.base.startswith("be "):
        tense = "past"
    time, time_zh = when(rng, tense if tense in ("past", "habit") else "future")
    timed, timed_zh = (f" {time}", time_zh) if rng.random() < 0.6 or tense == "habit" else ("", "")
    base = f"{verb.base}{rest}"
    if tense == "past":
        if negative:
            return Clause(
                who, "did", f"not {base}{timed}", f"did not {base}{timed}", f"{timed_zh}没有{around_zh}{simple}", False
            )
        done = verb.chinese(thing_zh, "了")
        return Clause(who, "did", f"{base}{timed}", f"{verb.past}{rest}{timed}", f"{timed_zh}{around_zh}{done}")
    if tense == "future":
        if rng.random() < 0.25 and who.human:
            shown = f"{'not ' if negative else ''}going to {base}{timed}"
            return Clause(
                who,
                who.be,
                shown,
                f"{who.be} {shown}",
                f"{timed_zh}{'不准备' if negative else '准备'}{around_zh}{simple}",
                not negative,
            )
        shown = f"{'not ' if negative else ''}{base}{timed}"
        return Clause(
            who,
            "will",
            shown,
            f"will {shown}",
            f"{timed_zh}{'不会' if negative else '会'}{around_zh}{simple}",
            not negative,
        )
    if tense == "habit":
        do = "does" if who.third else "do"
        verb_form = verb.third if who.third else verb.base
        if rng.random() < 0.4:
            often, often_zh = pick(rng, FREQUENCY)
            zh = f"{often_zh}{around_zh}{simple}"
            return Clause(who, do, f"{often} {base}", f"{often} {verb_form}{rest}", zh, not often_zh.endswith("不"))
        if negative:
            return Clause(
                who,
                do,
                f"not {base}{timed}",
                f"do{'es' if who.third else ''} not {base}{timed}",
                f"{timed_zh}不{around_zh}{simple}",
                False,
            )
        return Clause(
            who,
            do,
            f"{base}{timed}",
            f"{verb_form}{rest}{timed}",
            f"{timed_zh}{'都' if timed_zh.startswith('每') else ''}{around_zh}{simple}",
        )
    if tense == "now":
        shown = f"{'not ' if negative else ''}{verb.gerund}{rest}"
        at = "" if around_zh.startswith("在") else "在"
        return Clause(
            who,
            who.be,
            shown,
            f"{who.be} {shown}",
            f"{'现在没有' if negative else '正'}{at}{around_zh}{simple}",
            not negative,
        )
    if tense == "bare":
        do = "does" if who.third else "do"
        if negative:
            return Clause(who, do, f"not {base}", f"{do} not {base}", f"不{around_zh}{simple}", False)
        return Clause(who, do, base, f"{verb.third if who.third else verb.base}{rest}", f"{around_zh}{simple}")
    if tense == "perfect":
        have = "has" if who.third else "have"
        if negative:
            zh = f"从来没有{around_zh}{verb.chinese(thing_zh, '过')}"
            return Clause(
                who, have, f"never {verb.participle}{rest}", f"{have} never {verb.participle}{rest}", zh, False
            )
        zh = f"已经{around_zh}{verb.chinese(thing_zh, '了')}"
        return Clause(who, have, f"already {verb.participle}{rest}", f"{have} already {verb.participle}{rest}", zh)
    if tense == "modal":
        positive, denied, zh, denied_zh = pick(rng, MODALS)
        auxiliary, helper = (denied, denied_zh) if negative else (positive, zh)
        return Clause(
            who,
            positive,
            f"{base}{timed}",
            f"{auxiliary} {base}{timed}",
            f"{timed_zh}{helper}{around_zh}{simple}",
            positive in ("can", "should", "may") and not negative,
        )
    chain, zh, denied_zh = pick(rng, CHAINS if tense == "chain" else CHAINS[:3])
    do = "does" if who.third else "do"
    if negative and chain not in ("try to", "hope to", "refuse to"):
        return Clause(
            who,
            do,
            f"not {chain} {base}{timed}",
            f"{do} not {chain} {base}{timed}",
            f"{timed_zh}{denied_zh}{around_zh}{simple}",
            False,
        )
    head, _, mark = chain.partition(" ")
    inflected = {"have": "has", "try": "tries"}.get(head, f"{head}s") if who.third else head
    return Clause(
        who, do, f"{chain} {base}{timed}", f"{inflected} {mark} {base}{timed}", f"{timed_zh}{zh}{around_zh}{simple}"
    )
