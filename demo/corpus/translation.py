"""Translation documents: `English: …\\n\\nChinese: …` and the other way, canonical or in the variants people type."""

from __future__ import annotations

from random import Random

from demo.corpus import lexicon
from demo.corpus.document import Document, rounds
from demo.corpus.nominal import pick
from demo.corpus.sentences import Pair, sentence
from demo.corpus.split import held_out

CONTRACTIONS = (
    ("do not ", "don't "), ("does not ", "doesn't "), ("did not ", "didn't "), ("will not ", "won't "), ("cannot ", "can't "), ("is not ", "isn't "),
    ("are not ", "aren't "), ("should not ", "shouldn't "), ("I am ", "I'm "), ("he is ", "he's "), ("she is ", "she's "),
    ("they are ", "they're "), ("we are ", "we're "), ("you are ", "you're "), ("it is ", "it's "), ("I will ", "I'll "),
    ("I have already ", "I've already "), ("we have already ", "we've already "), ("could not ", "couldn't "), ("that is ", "that's "),
)  # fmt: skip
MARKS = {".": "。", "!": "！", "?": "？"}
SIDES = ("English", "Chinese")
REWORDED = (
    ("没有", "没", 0.15), ("就会", "就", 0.4), ("，所以", "，", 0.3), ("星期", "周", 0.2), ("星期", "礼拜", 0.05), ("经常", "常常", 0.2),
    ("但是", "可是", 0.2), ("但是", "不过", 0.1), ("非常", "特别", 0.1), ("因此", "所以", 0.2), ("明天会", "明天", 0.3), ("下周会", "下周", 0.3),
    ("哪里", "哪儿", 0.2), ("的时候", "时", 0.2), ("觉得", "认为", 0.15), ("公共汽车", "公交车", 0.2),
    ("妈妈", "母亲", 0.2), ("爸爸", "父亲", 0.2), ("我妈妈", "我的妈妈", 0.1), ("我爸爸", "我的爸爸", 0.1), ("？", "?", 0.05), ("！", "!", 0.05), ("，", ",", 0.03),
    ("很多", "许多", 0.15), ("知道", "晓得", 0.03), ("晚上", "夜里", 0.05), ("早上", "早晨", 0.1), ("。", ".", 0.02),
    ("如果", "要是", 0.15), ("虽然", "尽管", 0.15), ("点半", "点30分", 0.1),
)  # fmt: skip


def fresh_pair(rng: Random, *, held: bool = False) -> Pair:
    """A pair of the grammar on the training side, or on the held-out side of the split."""
    while True:
        pair = sentence(rng)
        if held:
            if held_out(pair.meanings[0]):
                return pair
        elif not any(held_out(meaning) for meaning in pair.meanings):
            return pair


def contracted(rng: Random, text: str) -> str:
    """The English with contractions, as people write it."""
    for long, short in CONTRACTIONS:
        for one, other in ((long, short), (long[0].upper() + long[1:], short[0].upper() + short[1:])):
            if text.startswith(one) or f" {one}" in text:
                text = text.replace(one, other)
    return text


def reworded(rng: Random, text: str) -> str:
    """The Chinese as others might put it; to be understood, never written."""
    for usual, other, chance in REWORDED:
        if usual in text and rng.random() < chance:
            text = text.replace(usual, other)
    return text


def unmarked(en: str, zh: str) -> tuple[str, str]:
    """Both sides without their final mark."""
    if en[-1:] in MARKS and not en.endswith("...") and MARKS[en[-1]] == zh[-1:]:
        return en[:-1], zh[:-1]
    return en, zh


def _typed(rng: Random, en: str, zh: str) -> tuple[str, str]:
    """The pair with English in the casing and marks of a hurried writer."""
    draw = rng.random()
    if draw < 0.55:
        return en, zh
    if draw < 0.75:
        return contracted(rng, en), zh
    if draw < 0.85:
        en, zh = unmarked(en, zh)
    if draw > 0.95:
        return (en.upper() if len(en) < 40 else en), zh
    if draw > 0.9:
        return (" ".join(w[:1].upper() + w[1:] for w in en.split(" ")) if len(en) < 40 else en), zh
    return en[0].lower() + en[1:], zh


def _phrase(rng: Random) -> tuple[str, str, str]:
    en, zh, mark = pick(rng, lexicon.phrases())
    if rng.random() < 0.35:
        en, zh = unmarked(en, zh)
    elif rng.random() < 0.25 and en[-1:] not in "?":
        bare = unmarked(en, zh)
        end = pick(rng, (".", "!"))
        if bare[1][-1:] not in "。！？…" and bare[0][-1:] not in ".!?":
            en, zh = bare[0] + end, bare[1] + MARKS[end]
    return en, zh, mark


def pair_to_translate(rng: Random) -> tuple[str, str, bool]:
    """A source, its translation and whether the source is English."""
    to_chinese = rng.random() < 0.5
    if rng.random() < 0.14:
        while True:
            en, zh, mark = _phrase(rng)
            if mark == "=" or (mark == ">") == to_chinese:
                break
    else:
        pair = fresh_pair(rng)
        en, zh = pair.en, pair.zh
        if rng.random() < 0.05:
            en, zh = unmarked(en, zh)
        elif rng.random() < 0.04:
            more = fresh_pair(rng)
            if en[-1] in MARKS and more.en[-1] in MARKS:
                en, zh = f"{en} {more.en}", f"{zh}{more.zh}"
    if not to_chinese:
        return (reworded(rng, zh) if rng.random() < 0.35 else zh), en, False
    en, zh = _typed(rng, en, zh)
    return en, zh, True


def prompt(source: str, *, english: bool) -> str:
    """The prompt that asks for a translation."""
    one, other = SIDES if english else SIDES[::-1]
    return f"{one}: {source}\n\n{other}:"


def _in_more_languages(rng: Random) -> tuple[str, str]:
    """The prompt and the answer of a fixed phrase between English and German or Japanese."""
    english, german, japanese = pick(rng, lexicon.more_phrases())
    name, other = pick(rng, (("German", german), ("Japanese", japanese)))
    if rng.random() < 0.3 and english[-1] in MARKS and not english.endswith("..."):
        english, other = english[:-1], other[:-1]
    if rng.random() < 0.5:
        english = english[0].lower() + english[1:] if rng.random() < 0.1 else english
        return f"English: {english}\n\n{name}:", f" {other}"
    return f"{name}: {other}\n\nEnglish:", f" {english}"


def document(rng: Random) -> Document:
    """One translation, seldom a few in a row."""
    if rng.random() < 0.025:
        return rounds([_in_more_languages(rng)])
    turns = []
    for _ in range(1 if rng.random() < 0.9 else rng.randint(2, 4)):
        source, target, english = pair_to_translate(rng)
        turns.append((prompt(source, english=english), f" {target}"))
    return rounds(turns)
