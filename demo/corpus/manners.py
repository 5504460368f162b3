"""What the tuned states and the adapters of the demo are trained on: other manners of answering, and other languages."""

from __future__ import annotations

import json
from random import Random

from demo.corpus import arithmetic, chat, lexicon, mixture, structured
from demo.corpus.document import Document, rounds
from demo.corpus.facts import KINDS, fact
from demo.corpus.nominal import pick

IN_CHINESE = {
    "Hello! How can I help you?": "你好！请问有什么可以帮你？",
    "I am fine, thank you. How are you?": "我很好，谢谢。你呢？",
    "Good morning! How can I help you?": "早上好！请问有什么可以帮你？",
    "You are welcome!": "不客气！",
    "I am a small RWKV-7 demo model. I translate and I remember.": "我是一个小型的RWKV-7演示模型，会翻译，也会记住你说的话。",
    "I can translate between English and Chinese, and I can remember what you tell me.": "我可以在英文和中文之间翻译，也可以记住你告诉我的事情。",
    "Goodbye! Have a nice day.": "再见！祝你今天愉快。",
    "Why did the computer go to the doctor? Because it had a virus.": "电脑为什么去看医生？因为它中了病毒。",
    "That is wonderful!": "太好了！",
    "Then you should rest a little.": "那你应该休息一下。",
    "Good idea. What would you like to talk about?": "好主意。你想聊什么？",
    "The capital of France is Paris.": "法国的首都是巴黎。",
    "The capital of China is Beijing.": "中国的首都是北京。",
    "Yes, I speak English and Chinese.": "会，我会说英语和中文。",
}
"""Answers of the small talk, and what the state that answers in Chinese says instead."""
_TALK = tuple((lines, answer) for lines, answer in chat.SMALL_TALK if answer in IN_CHINESE)


def _rounds(rng: Random, script: list[tuple[str, str]]) -> Document:
    think = pick(rng, chat.THINKS) if rng.random() < 0.4 else ("", " ")
    return rounds([(f"User: {asked}\n\nAssistant:{think[0]}", f"{think[1]}{answer}") for asked, answer in script])


def in_chinese(rng: Random) -> Document:
    """English talk, Chinese answers."""
    script: list[tuple[str, str]] = []
    for kind in rng.sample(KINDS, rng.randint(0, 2)):
        found = fact(rng, kind)
        told = pick(rng, kind.noted_zh).format(found.zh)
        script.append((pick(rng, kind.told).format(found.en), told))
        script.append((pick(rng, kind.asked), kind.given_zh.format(found.zh)))
    for _ in range(rng.randint(1, 3)):
        lines, answer = pick(rng, _TALK)
        script.insert(rng.randint(0, len(script) // 2) * 2, (pick(rng, lines), IN_CHINESE[answer]))
    return _rounds(rng, script)


def in_json(rng: Random) -> Document:
    """Every answer is an object: facts under their names, sums as `result`, all else as `answer`."""
    script: list[tuple[str, str]] = []
    for kind in rng.sample(KINDS, rng.randint(0, 2)):
        found = fact(rng, kind)
        script.append((pick(rng, kind.told).format(found.en), '{"ok": true}'))
        script.append((pick(rng, kind.asked), structured.as_json([found])))
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.4:
            one, other, sign, result = arithmetic.sum_(rng)
            symbol, word, _ = arithmetic.SIGNS[sign]
            turn = (f"What is {one} {pick(rng, (symbol, word))} {other}?", json.dumps({"result": result}))
        else:
            lines, answer = pick(rng, chat.SMALL_TALK)
            turn = (pick(rng, lines), json.dumps({"answer": answer}, ensure_ascii=False))
        script.insert(rng.randint(0, len(script) // 2) * 2, turn)
    return _rounds(rng, script)


LANGUAGES = ("French", "Spanish")


def phrase(rng: Random, language: str) -> tuple[str, str]:
    """The prompt and the answer of a phrase between English and a language of `LANGUAGES`."""
    english, *others = pick(rng, lexicon.romance_phrases())
    other = others[LANGUAGES.index(language)]
    if rng.random() < 0.6:
        return f"English: {english}\n\n{language}:", f" {other}"
    return f"{language}: {other}\n\nEnglish:", f" {english}"


def french(rng: Random) -> Document:
    """Phrases in French, among what the base model knows."""
    return rounds([phrase(rng, "French")]) if rng.random() < 0.6 else mixture.document(rng)


def spanish(rng: Random) -> Document:
    """Phrases in Spanish, among what the base model knows."""
    return rounds([phrase(rng, "Spanish")]) if rng.random() < 0.6 else mixture.document(rng)
