"""Prices, dates and numbers."""

from __future__ import annotations

from random import Random

from demo.corpus import lexicon
from demo.corpus.morphology import chinese, spelled
from demo.corpus.nominal import GOODS, POSSESSIVES, counted, noun_of, person, pick, term
from demo.corpus.templates.said import Said
from demo.corpus.times import WEEKDAYS, clock, date

CURRENCIES = (("dollars", "美元"), ("euros", "欧元"), ("yuan", "元"), ("pounds", "英镑"), ("yen", "日元"))


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
        my, mine = pick(rng, POSSESSIVES)
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


def number(rng: Random) -> Said:
    value = rng.randint(0, 99999)
    draw = rng.random()
    if draw < 0.2:
        return f"the number is {value}.", f"这个数字是{value}。"
    if draw < 0.4:
        my, mine = pick(rng, POSSESSIVES)
        phone = rng.randint(1000000, 99999999)
        return f"{my} phone number is {phone}.", f"{mine}的电话号码是{phone}。"
    if draw < 0.6:
        share, who = rng.randint(1, 99), pick(rng, lexicon.nouns("people")["role"])
        return f"{share} percent of the {who.plural} agree.", f"{share}%的{who.zh}同意。"
    small = rng.randint(1, 20)
    if draw < 0.8:
        return f"chapter {small}", f"第{chinese(small, counting=False)}章"
    return f"room {value % 1000}", f"{value % 1000}号房间"
