"""Arithmetic with small numbers, asked in many ways."""

from __future__ import annotations

from random import Random

from demo.corpus.document import Document, rounds
from demo.corpus.nominal import pick

SIGNS = (("+", "plus", "加"), ("-", "minus", "减"), ("*", "times", "乘"), ("/", "divided by", "除以"))


def sum_(rng: Random) -> tuple[int, int, int, int]:
    """Two small numbers, the index of a sign and the result."""
    sign = int(rng.random() * 4)
    if sign == 0:
        one, other = rng.randint(0, 99), rng.randint(0, 99)
        return one, other, sign, one + other
    if sign == 1:
        one = rng.randint(0, 99)
        other = rng.randint(0, one)
        return one, other, sign, one - other
    one, other = rng.randint(0, 12), rng.randint(1, 12)
    return (one, other, sign, one * other) if sign == 2 else (one * other, other, sign, one)


def exchange(rng: Random) -> tuple[str, str]:
    """A question and its answer, without labels."""
    one, other, sign, result = sum_(rng)
    symbol, word, chinese = SIGNS[sign]
    answer = f"{one} {symbol} {other} = {result}"
    asked = pick(
        rng,
        (
            f"What is {one} {symbol} {other}?", f"What is {one} {word} {other}?", f"{one} {symbol} {other} = ?", f"{one} {symbol} {other}",
            f"Calculate {one} {symbol} {other}.", f"How much is {one} {word} {other}?", f"{one}{symbol}{other}=?",
        ),
    )  # fmt: skip
    if rng.random() < 0.3:
        return pick(
            rng, (f"{one}{chinese}{other}等于多少？", f"{one} {symbol} {other} 等于几？")
        ), f"{one}{chinese}{other}等于{result}。"
    return asked, f"{answer}."


def document(rng: Random) -> Document:
    """One to four questions in a row."""
    turns = []
    for _ in range(rng.randint(1, 4)):
        asked, answer = exchange(rng)
        turns.append((f"User: {asked}\n\nAssistant:", f" {answer}"))
    return rounds(turns)
