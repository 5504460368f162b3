"""Training text of the tuned states and of the adapters."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from random import Random

from demo.corpus import chat, mixture, structured, translation
from demo.corpus.documents import Document, dialogue, rounds
from demo.corpus.grammar import pick
from demo.corpus.words import phrase_table

Script = list[tuple[str, str]]


def _document(rng: Random, script: Script, small_talk: Callable[[Random], tuple[str, str]]) -> Document:
    """Insert one to three rounds of small talk into a script of fact, question, fact, question."""
    for _ in range(rng.randint(1, 3)):
        script.insert(rng.randint(0, len(script) // 2) * 2, small_talk(rng))
    return rounds(dialogue(script, pick(rng, chat.THINKS) if rng.random() < 0.4 else None))


def _chinese_talk(rng: Random) -> tuple[str, str]:
    lines, _, answer = pick(rng, [line for line in phrase_table("small_talk") if len(line) == 3])
    return pick(rng, lines.split(" / ")), answer


def in_chinese(rng: Random) -> Document:
    """Sample an English chat with Chinese answers."""
    script: Script = []
    for kind in rng.sample(chat.kinds(), rng.randint(0, 2)):
        found = chat.fact(rng, kind)
        script.append((kind.say(rng, "told", found.en), kind.say(rng, "noted", found.zh, chinese=True)))
        script.append((kind.say(rng, "asked"), kind.say(rng, "given", found.zh, chinese=True)))
    return _document(rng, script, _chinese_talk)


def _json_talk(rng: Random) -> tuple[str, str]:
    if rng.random() < 0.4:
        terms = chat.arithmetic(rng)
        sign = pick(rng, (terms["sign"], terms["word"]["en"]))
        return f"What is {terms['a']} {sign} {terms['b']}?", json.dumps({"result": terms["result"]})
    lines, answer, *_ = pick(rng, phrase_table("small_talk"))
    return pick(rng, lines.split(" / ")), json.dumps({"answer": answer}, ensure_ascii=False)


def in_json(rng: Random) -> Document:
    """Sample a chat whose answers are JSON objects: facts, `result` of a sum, else `answer`."""
    script: Script = []
    for kind in rng.sample(chat.kinds(), rng.randint(0, 2)):
        found = chat.fact(rng, kind)
        script.append((kind.say(rng, "told", found.en), '{"ok": true}'))
        script.append((kind.say(rng, "asked"), structured.as_json([found])))
    return _document(rng, script, _json_talk)


def phrase(rng: Random, language: str) -> tuple[str, str]:
    """Sample prompt and answer of a phrase between English and French or Spanish."""
    while True:
        asked = translation.fixed(rng, "french_spanish", ("French", "Spanish"), to_other=0.6)
        if f"{language}:" in asked[0]:
            return asked


def _language(language: str, rng: Random) -> Document:
    """Sample phrases of a language, mixed with documents of the base model."""
    return rounds([phrase(rng, language)]) if rng.random() < 0.6 else mixture.document(rng)


french = partial(_language, "French")
spanish = partial(_language, "Spanish")
