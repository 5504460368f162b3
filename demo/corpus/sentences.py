"""Whole sentences: each template draws one meaning and says it in both languages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from demo.corpus import lexicon
from demo.corpus.clauses import clause
from demo.corpus.interface import interface
from demo.corpus.morphology import article, chinese, spelled
from demo.corpus.nominal import (
    FOOD,
    GOODS,
    PRONOUNS,
    THINGS,
    Nominal,
    attributive,
    counted,
    fitting,
    name,
    noun_of,
    other_person,
    person,
    pick,
    portion,
    possessor,
    professional,
    relative,
    term,
)  # fmt: skip
from demo.corpus.times import WEEKDAYS, clock, date, span, when
from demo.corpus.verb_phrases import complement, place, stative


@dataclass(frozen=True, slots=True)
class Pair:
    """A sentence in both languages; `meanings` decide which side of the split it is on."""

    en: str
    zh: str
    meanings: tuple[str, ...]


Said = tuple[str, str] | tuple[str, str, tuple[str, ...]]
DEGREES = (("very", "非常", ""), ("too", "太", "了"), ("really", "真", ""), ("quite", "相当", ""), ("a little", "有点儿", ""),
           ("so", "这么", ""), ("extremely", "极其", ""), ("", "很", ""), ("", "很", ""), ("not", "不", ""), ("not very", "不太", ""))  # fmt: skip
SPOTS = (
    ("on", "上"),
    ("under", "下面"),
    ("next to", "旁边"),
    ("behind", "后面"),
    ("in front of", "前面"),
    ("near", "附近"),
)
CURRENCIES = (("dollars", "美元"), ("euros", "欧元"), ("yuan", "元"), ("pounds", "英镑"), ("yen", "日元"))
RIDES = (
    ("train", "火车"),
    ("bus", "公共汽车"),
    ("plane", "飞机"),
    ("car", "汽车"),
    ("taxi", "出租车"),
    ("ship", "船"),
    ("subway", "地铁"),
    ("bicycle", "自行车"),
)
SEASONS = (("spring", "春天"), ("summer", "夏天"), ("autumn", "秋天"), ("winter", "冬天"))
THOUGHTS = (
    ("think", "觉得"),
    ("know", "知道"),
    ("hope", "希望"),
    ("believe", "相信"),
    ("suppose", "猜"),
    ("fear", "担心"),
)
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


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _thing(rng: Random, *, definite: bool = False) -> Nominal:
    return counted(rng, noun_of(rng, THINGS), definite=definite)


def _quality(
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


def statement(rng: Random) -> Said:
    one = clause(rng)
    return f"{one.en}.", f"{one.chinese()}。"


def negated_or_asked(rng: Random) -> Said:
    for _ in range(10):
        one = clause(rng)
        if one.question:
            return f"{one.asked}?", f"{one.chinese()}吗？"
    return f"{one.en}.", f"{one.chinese()}。"


def quality(rng: Random) -> Said:
    draw = rng.random()
    if draw < 0.45:
        who = person(rng)
        when_ = when(rng, "past") if rng.random() < 0.2 else ("", "")
        en, zh = _quality(rng, "person", who, who.was if when_[0] else "", when_)
        return f"{who.en} {en}.", f"{who.zh}{zh}。"
    if draw < 0.6:
        where = pick(rng, lexicon.terms("places")["place"][:32] + lexicon.terms("places")["city"])
        subject = Nominal(where.en if where.kind == "city" else f"the {where.en}", where.zh)
        en, zh = _quality(rng, "place", subject)
        return f"{subject.en} {en}.", f"{subject.zh}{zh}。"
    what = _thing(rng, definite=True)
    en, zh = _quality(rng, what.kind, what)
    return f"{what.en} {en}.", f"{what.zh}{zh}。"


def quality_question(rng: Random) -> Said:
    who, kind = (person(rng), "person") if rng.random() < 0.5 else (_thing(rng, definite=True), "")
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


def _own(rng: Random) -> tuple[Nominal, str, str]:
    """A person with `my` and 我的 of theirs."""
    table = (("my", "我"), ("your", "你"), ("his", "他"), ("her", "她"), ("our", "我们"), ("their", "他们"))
    index = int(rng.random() * len(PRONOUNS))
    return PRONOUNS[index], *table[index]


def about_oneself(rng: Random) -> Said:  # noqa: C901, PLR0912 - a table of facts
    who = person(rng)
    single = who if not who.many else name(rng)
    places = lexicon.terms("places")
    draw = rng.random()
    city, country = pick(rng, places["city"]), pick(rng, places["country"])
    home = pick(rng, (city, country))
    if draw < 0.1:
        _, my, mine = _own(rng)
        called = name(rng)
        if my in ("our", "their"):
            return f"{my} teacher's name is {called.en}.", f"{mine}的老师叫{called.zh}。"
        return f"{my} name is {called.en}.", f"{mine}的名字叫{called.zh}。" if my != "my" else f"我叫{called.zh}。"
    if draw < 0.2:
        return f"{who.en} {who.be} from {home.en}.", f"{who.zh}来自{home.zh}。"
    if draw < 0.3:
        verb = "lives" if who.third else "live"
        return f"{who.en} {verb} in {home.en}.", f"{who.zh}住在{home.zh}。"
    if draw < 0.38:
        years = span(rng)
        have = "has" if who.third else "have"
        return f"{who.en} {have} lived in {home.en} for {years[0]}.", f"{who.zh}在{home.zh}住了{years[1]}了。"
    if draw < 0.46:
        if rng.random() < 0.5:
            year = rng.randint(1930, 2020)
            return f"{who.en} {who.was} born in {year}.", f"{who.zh}出生于{year}年。"
        return f"{who.en} {who.was} born in {home.en}.", f"{who.zh}出生在{home.zh}。"
    if draw < 0.56:
        age = rng.randint(3, 20) if rng.random() < 0.5 else rng.randint(21, 99)
        return f"{who.en} {who.be} {spelled(age)} years old.", f"{who.zh}{chinese(age, counting=False)}岁。"
    if draw < 0.72:
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
    if draw < 0.8:
        number, family = rng.randint(2, 9), pick(rng, lexicon.nouns("people")["family"])
        have = "has" if who.third else "have"
        return f"{who.en} {have} {spelled(number)} {family.plural}.", f"{who.zh}有{chinese(number)}个{family.zh}。"
    if draw < 0.88:
        first, second = (pick(rng, [c for c in places["country"] if len(c.extra) == 2]) for _ in range(2))
        verb = "speaks" if who.third else "speak"
        if first is second:
            return f"{who.en} {verb} {first.extra[0]}.", f"{who.zh}会说{first.extra[1]}。"
        return (
            f"{who.en} {verb} {first.extra[0]} and {second.extra[0]}.",
            f"{who.zh}会说{first.extra[1]}和{second.extra[1]}。",
        )
    if draw < 0.94:
        illness = term(rng, "mass", "illness")
        have = "has" if single.third else "have"
        return (
            f"{single.en} {have} {article(illness.en)} {illness.en}.",
            f"{single.zh}{'得了' if illness.zh in ('感冒', '过敏') else ''}{illness.zh}。",
        )
    part = pick(rng, BODY_HURT)
    body = next(noun for noun in lexicon.nouns()["body"] if noun.en == part)
    _, my, mine = _own(rng)
    if my in ("our", "their"):
        my, mine = "my", "我"
    return f"{my} {part} hurts.", f"{mine}的{body.zh}疼。"


def because(rng: Random) -> Said:
    first = clause(rng)
    second_en, second_zh, second_key = _reason(rng, first.subject)
    zh = f"因为{second_zh}，所以{first.chinese()}。"
    return f"{first.en} because {second_en}.", zh, (first.en, second_key)


def _reason(rng: Random, subject: Nominal) -> tuple[str, str, str]:
    draw = rng.random()
    if draw < 0.3:
        en, zh = _quality(rng, "person", subject)
        return f"{subject.en} {en}", f"{subject.zh}{zh}", f"{subject.en} {en}"
    if draw < 0.45:
        en, zh = _weather(rng)
        return en, zh, en
    one = clause(rng)
    return one.en, one.chinese(), one.en


def condition(rng: Random) -> Said:
    first = clause(rng, tenses=("bare", "chain", "modal")) if rng.random() < 0.5 else None
    if first is None:
        en, zh = pick(rng, (("it rains tomorrow", "明天下雨"), ("it is sunny tomorrow", "明天是晴天"), ("it snows", "下雪"),
                            ("you have time", "你有时间"), ("I have time", "我有时间"), ("there is no problem", "没有问题"),
                            ("you are tired", "你累了"), ("it is too late", "太晚了"), ("it is necessary", "有必要"),
                            ("we have enough money", "我们有足够的钱"), ("he does not come", "他不来"), ("she comes", "她来")))  # fmt: skip
    else:
        en, zh = first.en, first.chinese()
    then = clause(rng, tenses=("future", "future", "modal", "chain"))
    return f"if {en}, {then.en}.", f"如果{zh}，{then.chinese('就')}。", (en, then.en)


def at_the_time(rng: Random) -> Said:
    draw = rng.random()
    first = clause(rng, tenses=("now", "bare") if draw < 0.5 else ("bare",))
    second = clause(rng, tenses=("habit", "future", "modal", "chain"))
    word, mark = ("when", "的时候") if draw < 0.5 else ("before", "之前") if draw < 0.75 else ("after", "之后")
    return f"{word} {first.en}, {second.en}.", f"{first.chinese()}{mark}，{second.chinese()}。", (first.en, second.en)


def contrast(rng: Random) -> Said:
    first, second = clause(rng), clause(rng)
    draw = rng.random()
    keys = (first.en, second.en)
    if draw < 0.45:
        return f"{first.en}, but {second.en}.", f"{first.chinese()}，但是{second.chinese()}。", keys
    if draw < 0.6:
        return f"although {first.en}, {second.en}.", f"虽然{first.chinese()}，但{second.chinese()}。", keys
    if draw < 0.8:
        return f"{first.en}, and {second.en}.", f"{first.chinese()}，而且{second.chinese()}。", keys
    if draw < 0.9:
        return f"{first.en}, so {second.en}.", f"{first.chinese()}，因此{second.chinese()}。", keys
    return f"{first.en} while {second.en}.", f"{second.chinese()}，同时{first.chinese()}。", keys


def reported(rng: Random) -> Said:
    one = clause(rng) if rng.random() < 0.6 else None
    if one is None:
        who = person(rng)
        en, zh = _quality(rng, "person", who)
        inner, inner_zh = f"{who.en} {en}", f"{who.zh}{zh}"
    else:
        inner, inner_zh = one.en, one.chinese()
    speaker = person(rng)
    draw = rng.random()
    if draw < 0.4:
        en, zh = pick(rng, THOUGHTS)
        return f"I {en} that {inner}.", f"我{zh}{inner_zh}。", (inner,)
    if draw < 0.55:
        return f"I do not think that {inner}.", f"我不觉得{inner_zh}。", (inner,)
    if draw < 0.65:
        return f"do you know that {inner}?", f"你知道{inner_zh}吗？", (inner,)
    if draw < 0.75:
        return f"I heard that {inner}.", f"我听说{inner_zh}。", (inner,)
    say = "says" if speaker.third else "say"
    return f"{speaker.en} {say} that {inner}.", f"{speaker.zh}说{inner_zh}。", (inner,)


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
    what = _thing(rng, definite=True)
    if draw < 0.92 and not what.many:
        return f"where is {what.en}?", f"{what.zh}在哪里？"
    if draw < 0.96:
        noun = noun_of(rng, GOODS)
        return f"which {noun.en} {do} {who.en} want?", f"{who.zh}想要哪{noun.measure}{noun.zh}？"
    where = term(rng, "places", "place")
    return f"how do I get to the {where.en}?", f"去{where.zh}怎么走？"


def there_is(rng: Random) -> Said:
    what = _thing(rng)
    spot, spot_zh = pick(rng, SPOTS)
    base = noun_of(rng, ("furniture", "vehicle", "building", "tool"))
    if what.en.startswith(("a ", "an ", "some ", "many ")) or what.en.split()[0] in (
        "two three four five six seven eight nine ten eleven twelve".split()
    ):
        if rng.random() < 0.4:
            en, zh = place(rng, towns=False)
            return f"there {what.be} {what.en} {en}.", f"{zh[1:]}里有{what.zh}。"
        return f"there {what.be} {what.en} {spot} the {base.en}.", f"{base.zh}{spot_zh}有{what.zh}。"
    draw = rng.random()
    if draw < 0.6:
        return f"{what.en} {what.be} {spot} the {base.en}.", f"{what.zh}在{base.zh}{spot_zh}。"
    if draw < 0.8:
        return f"{what.en} {what.be} not {spot} the {base.en}.", f"{what.zh}不在{base.zh}{spot_zh}。"
    return f"{what.be} {what.en} {spot} the {base.en}?", f"{what.zh}在{base.zh}{spot_zh}吗？"


def location(rng: Random) -> Said:
    places = tuple(p for p in lexicon.terms("places")["place"] if p.zh[-1] not in "边里")
    one, other, third = pick(rng, places), pick(rng, places), pick(rng, places)
    if len({one, other, third}) < 3:
        return location(rng)
    draw = rng.random()
    if draw < 0.6:
        spot, spot_zh = pick(rng, SPOTS[2:])
        return f"the {one.en} is {spot} the {other.en}.", f"{one.zh}在{other.zh}{spot_zh}。"
    if draw < 0.75:
        return f"the {one.en} is between the {other.en} and the {third.en}.", f"{one.zh}在{other.zh}和{third.zh}之间。"
    if draw < 0.85:
        return f"where is the nearest {one.en}?", f"最近的{one.zh}在哪里？"
    if draw < 0.92:
        side, side_zh = pick(rng, (("left", "左"), ("right", "右")))
        return f"turn {side} at the {one.en}.", f"在{one.zh}向{side_zh}转。"
    who = person(rng)
    en, zh = place(rng)
    return f"{who.en} {who.be} {en}.", f"{who.zh}{zh}。"


def price(rng: Random) -> Said:
    what = counted(rng, noun_of(rng, (*GOODS, "vehicle", "toy")), definite=True)
    currency, zh = pick(rng, CURRENCIES)
    number = rng.randint(2, 20) if rng.random() < 0.4 else rng.randint(21, 9999)
    amount, amount_zh = (
        (spelled(number), chinese(number)) if rng.random() < 0.8 else (f"{number}.{rng.randint(1, 9)}0", "")
    )
    cost = "cost" if what.many else "costs"
    amount_zh = amount_zh or amount
    draw = rng.random()
    if draw < 0.5:
        return f"{what.en} {cost} {amount} {currency}.", f"{what.zh}{amount_zh}{zh}。"
    if draw < 0.7:
        return f"how much {'do' if what.many else 'does'} {what.en} cost?", f"{what.zh}多少钱？"
    if draw < 0.8:
        return f"that is {amount} {currency} in total.", f"一共{amount_zh}{zh}。"
    who = person(rng)
    return f"{who.en} paid {amount} {currency} for {what.en}.", f"{who.zh}花了{amount_zh}{zh}买{what.zh}。"


def calendar(rng: Random) -> Said:
    draw = rng.random()
    day, day_zh = pick(rng, WEEKDAYS)
    en, zh = date(rng)
    if draw < 0.15:
        return f"today is {day}.", f"今天是星期{day_zh}。"
    if draw < 0.3:
        return f"today is {en}.", f"今天是{zh}。"
    if draw < 0.45:
        _, my, mine = _own(rng)
        return f"{my} birthday is on {en}.", f"{mine}的生日是{zh}。"
    if draw < 0.6:
        time, time_zh = clock(rng)
        return f"it is {time}.", f"现在{time_zh}。"
    if draw < 0.8:
        event = pick(rng, [n for n in lexicon.nouns()["thing"] if n.en in
                           ("party", "meeting", "appointment", "competition", "exam", "lesson", "festival", "wedding", "game", "discussion")])  # fmt: skip
        time, time_zh = clock(rng)
        if rng.random() < 0.5:
            return f"the {event.en} begins on {day} at {time}.", f"{event.zh}星期{day_zh}{time_zh}开始。"
        return f"the {event.en} takes place on {en}.", f"{event.zh}在{zh}举行。"
    where = term(rng, "places", "place")
    opens, opens_zh = pick(rng, (("opens", "开门"), ("closes", "关门")))
    time, time_zh = clock(rng)
    return f"the {where.en} {opens} at {time}.", f"{where.zh}{time_zh}{opens_zh}。"


def _weather(rng: Random) -> tuple[str, str]:
    word = pick(rng, lexicon.adjectives()["weather"])
    time, time_zh = pick(rng, (("today", "今天"), ("tomorrow", "明天"), ("yesterday", "昨天")))
    be = {"today": "is", "tomorrow": "will be", "yesterday": "was"}[time]
    if rng.random() < 0.4:
        return f"the weather {be} {word.en} {time}", f"{time_zh}天气{word.zh}"
    city = pick(rng, lexicon.terms("places")["city"] + lexicon.terms("places")["country"])
    draw = rng.random()
    if draw < 0.5:
        return f"the weather in {city.en} {be} {word.en} {time}", f"{time_zh}{city.zh}天气{word.zh}"
    kind, kind_zh = pick(rng, (("rain", "下雨"), ("snow", "下雪")))
    verb = {"today": f"is {kind}ing", "tomorrow": f"will {kind}", "yesterday": f"{kind}ed"}[time]
    mark = {"today": "正在", "tomorrow": "会", "yesterday": ""}[time]
    ending = "了" if time == "yesterday" else ""
    return f"it {verb} in {city.en} {time}", f"{time_zh}{city.zh}{mark}{kind_zh}{ending}"


def weather(rng: Random) -> Said:
    draw = rng.random()
    city = term(rng, "places", "city")
    if draw < 0.6:
        en, zh = _weather(rng)
        return f"{en}.", f"{zh}。"
    if draw < 0.8:
        degrees = rng.randint(21, 45)
        time, time_zh = pick(rng, (("today", "今天"), ("tomorrow", "明天")))
        be = "is" if time == "today" else "will be"
        return f"it {be} {degrees} degrees in {city.en} {time}.", f"{time_zh}{city.zh}{degrees}度。"
    season, season_zh = pick(rng, SEASONS)
    word = pick(rng, lexicon.adjectives()["weather"])
    return f"the weather in {city.en} is {word.en} in {season}.", f"{city.zh}{season_zh}天气{word.zh}。"


def request(rng: Random) -> Said:
    you = PRONOUNS[1]
    for _ in range(20):
        verb, thing, thing_zh = complement(rng, you)
        if not stative(verb) and verb.progressive:
            break
    base, zh = f"{verb.base}{thing}{verb.tail}", verb.chinese(thing_zh)
    draw = rng.random()
    if draw < 0.3:
        return f"please {base}.", f"请{zh}。"
    if draw < 0.5:
        return f"do not {base}!", f"不要{zh}！"
    if draw < 0.65:
        return f"let's {base}!", f"我们{zh}吧！"
    if draw < 0.8:
        return f"could you please {base}?", f"请问你能{zh}吗？"
    if draw < 0.9:
        return f"do you want to {base} with me?", f"你想跟我一起{zh}吗？"
    return f"it is forbidden to {base}.", f"禁止{zh}。"


def ordering(rng: Random) -> Said:
    served = rng.random() < 0.5
    what = portion(rng, pick(rng, ("drink", "dish"))) if served else counted(rng, noun_of(rng, FOOD))
    if not what.en.startswith(("a ", "an ")) and not what.many:
        return f"{what.en} {what.be} available.", f"有{what.zh}。"
    draw = rng.random()
    if draw < 0.4:
        return f"I would like {what.en}, please.", f"请给我{what.zh}。"
    if draw < 0.6:
        return f"we would like to order {what.en}.", f"我们想点{what.zh}。"
    if draw < 0.8:
        other = portion(rng, "drink")
        return f"{what.en} and {other.en}, please.", f"请来{what.zh}和{other.zh}。"
    return f"do you have {what.en}?", f"你们有{what.zh}吗？"


def travel(rng: Random) -> Said:
    places = lexicon.terms("places")
    one, other = pick(rng, places["city"]), pick(rng, places["city"] + places["country"])
    if one is other:
        return travel(rng)
    ride, ride_zh = pick(rng, RIDES)
    mount = "骑" if ride == "bicycle" else "坐"
    who = person(rng)
    draw = rng.random()
    time, time_zh = clock(rng)
    if draw < 0.3:
        tense = rng.random()
        if tense < 0.4:
            at, at_zh = when(rng, "past")
            return f"{who.en} went to {other.en} by {ride} {at}.", f"{who.zh}{at_zh}{mount}{ride_zh}去了{other.zh}。"
        if tense < 0.7:
            at, at_zh = when(rng, "future")
            return f"{who.en} will go to {other.en} by {ride} {at}.", f"{who.zh}{at_zh}会{mount}{ride_zh}去{other.zh}。"
        want = "wants" if who.third else "want"
        return f"{who.en} {want} to go to {other.en} by {ride}.", f"{who.zh}想{mount}{ride_zh}去{other.zh}。"
    if draw < 0.5:
        verb, verb_zh = pick(rng, (("leaves", "出发"), ("arrives", "到达")))
        return f"the {ride} to {other.en} {verb} at {time}.", f"去{other.zh}的{ride_zh}{time_zh}{verb_zh}。"
    if draw < 0.65:
        hours = span(rng)
        return (
            f"it takes {hours[0]} from {one.en} to {other.en} by {ride}.",
            f"从{one.zh}到{other.zh}{mount}{ride_zh}要{hours[1]}。",
        )
    if draw < 0.8:
        number = rng.randint(2, 12)
        return f"{spelled(number)} tickets to {other.en}, please.", f"请给我{chinese(number)}张去{other.zh}的票。"
    if draw < 0.9:
        have = "has" if who.third else "have"
        never = rng.random() < 0.5
        return (f"{who.en} {have} never been to {other.en}.", f"{who.zh}从来没去过{other.zh}。") if never else \
            (f"{who.en} {have} already been to {other.en}.", f"{who.zh}已经去过{other.zh}。")  # fmt: skip
    number = rng.randint(21, 9999)
    return f"{one.en} is {number} kilometers from {other.en}.", f"{one.zh}离{other.zh}{number}公里。"


def giving(rng: Random) -> Said:
    who = person(rng)
    other = other_person(rng, who)
    what = _thing(rng)
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
    en, zh = _quality(rng, noun.kind, subject)
    return f"{subject.en} {en}.", f"{subject.zh}{zh}。"


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


def identity(rng: Random) -> Said:
    draw = rng.random()
    if draw < 0.4:
        what = _thing(rng)
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


def number(rng: Random) -> Said:
    value = rng.randint(0, 99999)
    draw = rng.random()
    if draw < 0.2:
        return f"the number is {value}.", f"这个数字是{value}。"
    if draw < 0.4:
        _, my, mine = _own(rng)
        phone = rng.randint(1000000, 99999999)
        return f"{my} phone number is {phone}.", f"{mine}的电话号码是{phone}。"
    if draw < 0.6:
        share, who = rng.randint(1, 99), pick(rng, lexicon.nouns("people")["role"])
        return f"{share} percent of the {who.plural} agree.", f"{share}%的{who.zh}同意。"
    small = rng.randint(1, 20)
    if draw < 0.8:
        return f"chapter {small}", f"第{chinese(small, counting=False)}章"
    return f"room {value % 1000}", f"{value % 1000}号房间"


Template = Callable[[Random], Said]
TEMPLATES: tuple[tuple[Template, float], ...] = (
    (statement, 24), (negated_or_asked, 8), (quality, 7), (quality_question, 2), (comparison, 3), (about_oneself, 7), (because, 5),
    (condition, 3), (at_the_time, 4), (contrast, 4), (reported, 3), (wh_question, 5), (there_is, 4), (location, 3), (price, 3),
    (calendar, 3), (weather, 3), (request, 4), (ordering, 3), (travel, 4), (giving, 3), (relative_clause, 3), (passive, 3),
    (material, 1), (general_truth, 2), (exclamation, 1.5), (identity, 2), (noun_phrase, 4), (number, 1), (interface, 9),
)  # fmt: skip
_CHOICES = [template for template, _ in TEMPLATES]
_WEIGHTS = [weight for _, weight in TEMPLATES]


def sentence(rng: Random) -> Pair:
    """One sentence pair of the grammar, on either side of the split."""
    while True:
        said = rng.choices(_CHOICES, _WEIGHTS)[0](rng)
        en, zh = said[0], said[1]
        if en and zh:
            parts = said[2] if len(said) == 3 else ()
            return Pair(_capital(en), zh, (en, *parts))
