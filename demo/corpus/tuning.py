"""Training text of the tuned states and of the adapters."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from random import Random

from demo.corpus import chat, mixture, structured, translation
from demo.corpus.chat import Fact
from demo.corpus.documents import Document, dialogue, rounds
from demo.corpus.grammar import pick
from demo.corpus.words import phrase_table

Script = list[tuple[str, str]]


def _document(rng: Random, turns: Callable[[Random, Fact], Script], small_talk: Callable[[Random], Script]) -> Document:
    """Sample a chat with up to two facts and small talk.

    Each fact is stated and asked for. The small talk has one to three rounds.
    """
    script = [turns(rng, chat.fact(rng, kind)) for kind in rng.sample(chat.kinds(), rng.randint(0, 2))]
    for _ in range(rng.randint(1, 3)):
        script.insert(rng.randint(0, len(script)), small_talk(rng))
    think = pick(rng, chat.THINKS) if rng.random() < 0.4 else None
    return rounds(dialogue([turn for part in script for turn in part], think))


def _turns(rng: Random, found: Fact, told: str, given: str) -> Script:
    return [(found.say(rng, "told", chinese=False), told), (found.say(rng, "asked", chinese=False), given)]


def _chinese_turns(rng: Random, found: Fact) -> Script:
    return _turns(rng, found, found.say(rng, "noted", chinese=True), found.say(rng, "given", chinese=True))


def _chinese_talk(rng: Random) -> Script:
    lines, _, answer = pick(rng, [line for line in phrase_table("small_talk") if len(line) == 3])
    return [(pick(rng, lines.split(" / ")), answer)]


def in_chinese(rng: Random) -> Document:
    """Sample an English chat with Chinese answers."""
    return _document(rng, _chinese_turns, _chinese_talk)


def _json_turns(rng: Random, found: Fact) -> Script:
    return _turns(rng, found, '{"ok": true}', structured.as_json([found]))


def _json_talk(rng: Random) -> Script:
    if rng.random() < 0.4:
        terms = chat.arithmetic(rng)
        sign = pick(rng, (terms["sign"], terms["word"]["en"]))
        return [(f"What is {terms['a']} {sign} {terms['b']}?", json.dumps({"result": terms["result"]}))]
    lines, answer, *_ = pick(rng, phrase_table("small_talk"))
    return [(pick(rng, lines.split(" / ")), json.dumps({"answer": answer}, ensure_ascii=False))]


def in_json(rng: Random) -> Document:
    """Sample a chat whose answers are JSON objects: facts, `result` of a sum, else `answer`."""
    return _document(rng, _json_turns, _json_talk)


def phrase(rng: Random, language: str) -> tuple[str, str]:
    """Sample prompt and answer of a phrase between English and `language`. `language` is French or Spanish."""
    while True:
        asked = translation.fixed(rng, "french_spanish", ("French", "Spanish"), to_other=0.6, bare=0)
        if f"{language}:" in asked[0]:
            return asked


def _language(language: str, rng: Random) -> Document:
    """Sample phrases of a language, mixed with documents of the base model."""
    return rounds([phrase(rng, language)]) if rng.random() < 0.6 else mixture.document(rng)


french = partial(_language, "French")
spanish = partial(_language, "Spanish")
