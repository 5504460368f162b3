"""Chats: facts that users state and ask for later, with small talk in between."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from random import Random
from typing import NamedTuple

from demo.corpus.documents import Document, held_out, rounds
from demo.corpus.grammar import PRIMITIVES, expand, pick, render
from demo.corpus.translation import pair_phrase
from demo.corpus.words import ROOT, Phrase, phrase_table

THINKS = ((" <think>\n</think>\n", ""), (" <think></think", ">\n"), (" <think>\n</think>", "\n"))
"""How a prompt skips the thoughts, and what the answer then starts with."""
SIGNS = (("+", "plus", "加"), ("-", "minus", "减"), ("*", "times", "乘"), ("/", "divided by", "除以"))
_PLACES = {"city", "country", "hometown", "favorite city"}


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fact. `lines` holds its sentences by name: `told`, `asked_zh`; `{}` is the value."""

    name: str
    value: str
    lines: dict[str, list[str]]

    def say(self, rng: Random, name: str, value: str = "", *, chinese: bool = False) -> str:
        return pick(rng, self.lines[f"{name}_zh" if chinese else name]).format(value)

    @property
    def key(self) -> str:
        """The key in JSON: `favorite_color`."""
        return self.name.replace("'s name", "").replace(" ", "_").lower()


class Fact(NamedTuple):
    """A kind with a value in both languages."""

    kind: Kind
    en: str
    zh: str

    def say(self, rng: Random, name: str, *, chinese: bool) -> str:
        return self.kind.say(rng, name, self.zh if chinese else self.en, chinese=chinese)


class Turn(NamedTuple):
    """A user's line and its answer; `recall` is the fact that the answer repeats."""

    user: str
    answer: str
    recall: Fact | None = None


@cache
def kinds() -> tuple[Kind, ...]:
    found = []
    for name, table in tomllib.loads((ROOT / "facts.toml").read_text(encoding="utf-8")).items():
        for thing, (zh, value) in table.pop("things", {"": ("", "")}).items():
            lines = {
                key: [line.replace("{thing}", zh if key.endswith("_zh") else thing) for line in texts]
                for key, texts in table.items()
                if key != "value"
            }
            title = f"favorite {thing}" if name == "favorite" else thing or name
            found.append(Kind(title, value or table["value"], lines))
    return tuple(found)


@cache
def kind(name: str) -> Kind:
    return next(one for one in kinds() if one.name == name)


def fact(rng: Random, of: Kind) -> Fact:
    value = render(rng, of.value)
    return Fact(of, value["en"], value["zh"])


def arithmetic(rng: Random) -> Phrase:
    """Sample `a`, `sign`, `b` and `result` of a sum with small numbers."""
    sign = int(rng.random() * 4)
    a, b = rng.randint(0, 99 if sign < 2 else 12), rng.randint(1, 12)
    if sign < 2:
        b = rng.randint(0, 99 if sign == 0 else a)
    if sign == 3:
        a *= b
    result = (a + b, a - b, a * b, a // max(b, 1))[sign]
    symbol, word, zh = SIGNS[sign]
    return {"a": a, "b": b, "sign": symbol, "word": {"en": word, "zh": zh}, "result": result}


def greeting(rng: Random, language: str) -> Phrase:
    table = [line for line in phrase_table("small_talk") if (ord(line[1][0]) > 0x2000) == (language == "zh")]
    asked, answer, *_ = pick(rng, table)
    return {"zh_asked": pick(rng, asked.split(" / ")), "zh_answer": answer}


PRIMITIVES.update(arithmetic=arithmetic, greeting=greeting, pair=pair_phrase)


def exchange(rng: Random, symbol: str) -> Turn:
    """Sample a turn of a section with the columns `zh_asked` and `zh_answer`."""
    said = expand(rng, symbol)
    return Turn(said["zh_asked"], said["zh_answer"])


def small_talk(rng: Random, chinese: bool) -> Turn:
    return exchange(rng, "small_talk.zh" if chinese else "small_talk.en")


def telling(rng: Random, facts: list[Fact], chinese: bool) -> Turn:
    told = [one.say(rng, "told", chinese=chinese) for one in facts]
    if len(facts) == 1:
        answer = facts[0].say(rng, "noted", chinese=chinese)
        return Turn(told[0], answer[0].upper() + answer[1:])
    if chinese:
        return Turn(told[0] + ("" if told[0][-1] in "。！" else "。") + told[1], "好的，我记住了。")
    answer = "Got it, I will remember that."
    if rng.random() < 0.4 and told[1].startswith(("My ", "I ", "I'm ")):
        second = told[1] if told[1].startswith("I") else told[1][0].lower() + told[1][1:]
        return Turn(f"{told[0].rstrip('.!')} and {second}", answer)
    return Turn(told[0] + (" " if told[0][-1] in ".!" else ". ") + told[1], answer)


def asking(rng: Random, found: Fact, chinese: bool) -> Turn:
    answer = found.say(rng, "given", chinese=chinese)
    return Turn(found.kind.say(rng, "asked", chinese=chinese), answer, found)


def key(facts: list[Fact]) -> str:
    """Return the text whose hash decides the side of the split: all facts of the session."""
    return " | ".join(sorted(f"{f.kind.name} is {f.en}" for f in facts))


def split_facts(rng: Random, held: bool, choose: Callable[[Random], list[Kind]]) -> list[Fact]:
    """Sample facts of chosen kinds on one side of the split. It chooses again: some kinds have few values."""
    while True:
        facts = [fact(rng, one) for one in choose(rng)]
        if held_out(key(facts)) == held:
            return facts


def _choose(count: int, rng: Random) -> list[Kind]:
    """Names and numbers are more frequent."""
    first = kind("name") if rng.random() < 0.3 else kind("number") if rng.random() < 0.15 else pick(rng, kinds())
    return [first, *[one for one in rng.sample(kinds(), count) if one is not first][: count - 1]]


def session(rng: Random, *, held: bool = False, turns: tuple[int, int] | None = None) -> list[Turn]:
    """Sample a chat: facts, then `turns` rounds of small talk, then questions. A held-out one has two to four facts."""
    chinese = rng.random() < 0.25
    count = rng.randint(2, 4) if held else rng.choices((1, 2, 3, 4, 5), (35, 27, 18, 12, 8))[0]
    facts = split_facts(rng, held, partial(_choose, count))
    low, high = turns or ((0, 3) if rng.random() < 0.7 else (2, 9))
    script = [small_talk(rng, chinese)] if rng.random() < 0.3 else []
    waiting = list(facts)
    while waiting:
        some = 2 if len(waiting) > 1 and rng.random() < 0.25 else 1
        script.append(telling(rng, waiting[:some], chinese))
        waiting = waiting[some:]
        if waiting and rng.random() < 0.3:
            script.append(small_talk(rng, chinese))
        if waiting and rng.random() < 0.15:
            script.append(asking(rng, facts[0], chinese))
    if not held and rng.random() < 0.06:
        changed = fact(rng, facts[0].kind)
        if not held_out(key([changed, *facts[1:]])):
            facts[0] = changed
            turn = telling(rng, [changed], chinese)
            script.append(Turn(("不对，" if chinese else "Sorry, that was wrong. ") + turn.user, turn.answer))
    script += [small_talk(rng, chinese) for _ in range(rng.randint(low, high))]
    for found in rng.sample(facts, rng.randint(1, len(facts))):
        script.append(asking(rng, found, chinese))
        if rng.random() < 0.25:
            script.append(small_talk(rng, chinese))
    if rng.random() < 0.12 and not held:
        missing = pick(rng, [one for one in kinds() if not any(_similar(one, f.kind) for f in facts)])
        script.append(Turn(missing.say(rng, "asked", chinese=chinese), missing.say(rng, "unknown", chinese=chinese)))
    return script


def _similar(one: Kind, other: Kind) -> bool:
    """Return whether a question for one kind may mean the other."""
    return bool(set(one.name.split()) & set(other.name.split())) or {one.name, other.name} <= _PLACES


def prompts(rng: Random, script: list[Turn], *, plain: bool = False) -> Iterator[tuple[str, str]]:
    """Yield each turn's prompt and answer, as a server sends them."""
    system = f"System: {expand(rng, 'system')['en']}\n\n" if rng.random() < 0.35 and not plain else ""
    mode = 0.0 if plain else rng.random()
    think = pick(rng, THINKS) if mode > 0.6 else None
    for turn in script:
        if mode > 0.85:
            thought = f"I remember: {turn.recall.en}." if turn.recall else "This is easy."
            hint = pick(rng, ("", "", " (think)", " (think a bit)", " (think a lot)"))
            answer = f">\n{thought}\n</think>\n{turn.answer}"
            yield f"{system}User: {turn.user}{hint}\n\nAssistant: <think", answer
        else:
            opening, begin = think if think and rng.random() < 0.8 else ("", " ")
            yield f"{system}User: {turn.user}\n\nAssistant:{opening}", f"{begin}{turn.answer}"
        system = ""


def document(rng: Random) -> Document:
    return rounds(list(prompts(rng, session(rng))))
