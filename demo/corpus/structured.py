"""JSON answers: facts of a text or of the chat, translations and sums."""

from __future__ import annotations

import json
from random import Random

from demo.corpus import chat
from demo.corpus.chat import Fact, Kind
from demo.corpus.documents import Document, dialogue, rounds
from demo.corpus.grammar import expand, pick

NUMBERS = frozenset({"age", "number", "favorite number", "room number", "lucky number"})
"""Kinds whose value is a JSON number."""


def as_json(facts: list[Fact]) -> str:
    values = {one.kind.key: int(one.en) if one.kind.name in NUMBERS else one.en for one in facts}
    return json.dumps(values, ensure_ascii=False)


def _request(rng: Random, symbol: str, facts: list[Fact], text: str = "") -> str:
    def listed(names: list[str]) -> str:
        return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))

    keys = listed([one.kind.name for one in facts])
    quoted = listed([f'"{one.kind.key}"' for one in facts])
    return str(expand(rng, symbol, keys=keys, quoted=quoted, text=text)["zh_asked"])


def _kinds(rng: Random) -> list[Kind]:
    return rng.sample(chat.kinds(), rng.randint(1, 3))


def _kinds_of_others(rng: Random) -> list[Kind]:
    """Choose a third person's name and one or two other kinds."""
    others = [kind for kind in chat.kinds() if "third" in kind.lines]
    return [chat.kind("name"), *rng.sample(others, rng.randint(1, 2))]


def extraction(rng: Random, *, held: bool = False) -> tuple[str, str]:
    """Sample a request to extract a text's facts, and the JSON answer."""
    third = rng.random() < 0.5
    facts = chat.split_facts(rng, held, _kinds_of_others if third else _kinds)
    if third:
        said = [pick(rng, one.kind.lines["third"]).format(one.en, name=facts[0].en) for one in facts[1:]]
    else:
        said = [one.kind.say(rng, "told", one.en) for one in facts]
        said = [line if line[-1] in ".!?" else f"{line}." for line in said]
    return _request(rng, "extract", facts, " ".join(said)), as_json(facts)


def _from_chat(rng: Random) -> list[tuple[str, str]]:
    """Sample a chat that states facts. It ends with a request for some of them."""
    facts = chat.split_facts(rng, False, _kinds)
    turns = [chat.telling(rng, [one], chinese=False) for one in facts]
    if rng.random() < 0.3:
        turns.append(chat.small_talk(rng, chinese=False))
    some = rng.sample(facts, rng.randint(1, len(facts)))
    return [*((turn.user, turn.answer) for turn in turns), (_request(rng, "extract_from_chat", some), as_json(some))]


def _short(rng: Random) -> tuple[str, str]:
    """Sample a translation or a sum as JSON."""
    if rng.random() < 0.5:
        turn = chat.exchange(rng, "ask_translation_json")
        return turn.user, json.dumps({"translation": turn.answer}, ensure_ascii=False)
    said = expand(rng, "sum_json")
    return said["zh_asked"], json.dumps({"result": said["s"]["result"]})


def document(rng: Random) -> Document:
    """Sample a request with its answer, or a chat ending with one.

    Under a grammar an answer starts without a space, so most JSON answers here do, too.
    """
    share = rng.random()
    script = [extraction(rng)] if share < 0.5 else _from_chat(rng) if share < 0.8 else [_short(rng)]
    system = expand(rng, "json_system")["en"] if rng.random() < 0.6 else ""
    think = pick(rng, chat.THINKS) if rng.random() < 0.6 else None
    turns = []
    for prompt, answer in dialogue(script, think, system):
        bare = answer.lstrip()
        turns.append((prompt, bare if bare.startswith("{") and rng.random() < 0.6 else answer))
    return rounds(turns)
