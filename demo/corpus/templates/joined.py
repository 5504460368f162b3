"""Two clauses in one sentence: reasons, conditions, contrasts, what somebody thinks or says."""

from __future__ import annotations

from random import Random

from demo.corpus.clauses import clause
from demo.corpus.nominal import Nominal, person, pick
from demo.corpus.templates.qualities import predicate
from demo.corpus.templates.said import Said
from demo.corpus.templates.weather import weather_clause

THOUGHTS = (
    ("think", "觉得"),
    ("know", "知道"),
    ("hope", "希望"),
    ("believe", "相信"),
    ("suppose", "猜"),
    ("fear", "担心"),
)


def because(rng: Random) -> Said:
    first = clause(rng)
    second_en, second_zh, second_key = _reason(rng, first.subject)
    zh = f"因为{second_zh}，所以{first.chinese()}。"
    return f"{first.en} because {second_en}.", zh, (first.en, second_key)


def _reason(rng: Random, subject: Nominal) -> tuple[str, str, str]:
    draw = rng.random()
    if draw < 0.3:
        en, zh = predicate(rng, "person", subject)
        return f"{subject.en} {en}", f"{subject.zh}{zh}", f"{subject.en} {en}"
    if draw < 0.45:
        en, zh = weather_clause(rng)
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
        en, zh = predicate(rng, "person", who)
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
