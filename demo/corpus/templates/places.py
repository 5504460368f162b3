"""Where something is, and ways there."""

from __future__ import annotations

from random import Random

from demo.corpus import lexicon
from demo.corpus.morphology import chinese, spelled
from demo.corpus.nominal import noun_of, person, pick, something
from demo.corpus.templates.said import Said
from demo.corpus.times import clock, span, when
from demo.corpus.verb_phrases import place

SPOTS = (
    ("on", "上"),
    ("under", "下面"),
    ("next to", "旁边"),
    ("behind", "后面"),
    ("in front of", "前面"),
    ("near", "附近"),
)
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


def there_is(rng: Random) -> Said:
    what = something(rng)
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
