"""What is asked of somebody: to do, not to do, to bring."""

from __future__ import annotations

from random import Random

from demo.corpus.nominal import FOOD, PRONOUNS, counted, noun_of, pick, portion
from demo.corpus.templates.said import Said
from demo.corpus.verb_phrases import complement, stative


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
