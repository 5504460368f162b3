"""The language of buttons, notices and web pages."""

from __future__ import annotations

from random import Random

from demo.corpus.morphology import plural
from demo.corpus.nominal import name, pick, term

STATES = (
    ("failed", "失败"),
    ("completed", "已完成"),
    ("canceled", "已取消"),
    ("in progress", "进行中"),
    ("not available", "不可用"),
)


def interface(rng: Random) -> tuple[str, str]:
    """A string of an interface, composed of a verb, a noun and a frame."""
    verb, noun = term(rng, "ui", "verb"), term(rng, "ui", "noun")
    field, key = term(rng, "ui", "field"), term(rng, "ui", "key")
    unit, count = term(rng, "ui", "unit"), term(rng, "ui", "count")
    number = rng.randint(2, 999)
    some = f"{number}{count.extra[0]}{count.zh}"
    frames = (
        (f"{verb.en} {noun.en}", f"{verb.zh}{noun.zh}"),
        (f"{verb.en} this {noun.en}?", f"{verb.zh}此{noun.zh}？"),
        (f"{verb.en} all {plural(noun.en)}", f"{verb.zh}所有{noun.zh}"),
        (f"{verb.en} selected {plural(noun.en)}", f"{verb.zh}所选{noun.zh}"),
        (f"all my {plural(noun.en)}", f"我的所有{noun.zh}"),
        (f"new {noun.en}", f"新建{noun.zh}"),
        (f"{noun.en} settings", f"{noun.zh}设置"),
        (f"{noun.en} not found", f"未找到{noun.zh}"),
        (f"no {plural(noun.en)} yet", f"暂无{noun.zh}"),
        (f"failed to {verb.en} the {noun.en}.", f"无法{verb.zh}{noun.zh}。"),
        (f"are you sure you want to {verb.en} this {noun.en}?", f"您确定要{verb.zh}此{noun.zh}吗？"),
        (f"you do not have permission to {verb.en} this {noun.en}.", f"您没有权限{verb.zh}此{noun.zh}。"),
        (f"click here to {verb.en} the {noun.en}.", f"点击此处{verb.zh}{noun.zh}。"),
        (f"please {verb.en} the {noun.en} first.", f"请先{verb.zh}{noun.zh}。"),
        (f"the {noun.en} has expired.", f"{noun.zh}已过期。"),
        (f"the {noun.en} already exists.", f"{noun.zh}已存在。"),
        (f"please enter your {field.en}.", f"请输入您的{field.zh}。"),
        (f"invalid {field.en}", f"{field.zh}无效"),
        (f"your {field.en} is required.", f"{field.zh}为必填项。"),
        (f"the {field.en} is too short.", f"{field.zh}太短。"),
        (f"sort by {key.en}", f"按{key.zh}排序"),
        (f"filter by {key.en}", f"按{key.zh}筛选"),
        (f"{number} {plural(count.en)}", some),
        (f"{number} new {plural(count.en)}", f"{number}{count.extra[0]}新{count.zh}"),
        (f"you have {number} unread {plural(count.en)}.", f"您有{number}{count.extra[0]}未读{count.zh}。"),
        (f"{number} {unit.en}s ago", f"{number}{unit.zh}前"),
        (f"last updated {number} {unit.en}s ago", f"{number}{unit.zh}前更新"),
        (f"{number} {unit.en}s remaining", f"剩余{number}{unit.zh}"),
        (f"your trial ends in {number} {unit.en}s.", f"您的试用期将在{number}{unit.zh}后结束。"),
        (f"welcome, {(who := name(rng)).en}!", f"欢迎您，{who.zh}！"),
        (f"save {number % 100}%", f"立省{number % 100}%"),
    )
    draw = rng.random()
    if draw < 0.08:
        done, done_zh = pick(rng, STATES)
        return f"{noun.en} {done}", f"{noun.zh}{done_zh}"
    if draw < 0.12:
        last = number + rng.randint(1, 50)
        return f"page {number} of {last}", f"第{number}页，共{last}页"
    return pick(rng, frames)
