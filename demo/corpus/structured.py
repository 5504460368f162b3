"""Answers as JSON objects: facts taken from a sentence, facts of the talk, translations and sums."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random

from demo.corpus import arithmetic, chat
from demo.corpus.document import Document, rounds
from demo.corpus.facts import KINDS, Fact, Kind, fact
from demo.corpus.nominal import pick
from demo.corpus.split import held_out
from demo.corpus.translation import fresh_pair

NUMBERS = frozenset({"age", "number", "favorite number", "room number", "lucky number"})
THIRD: dict[str, tuple[str, ...]] = {
    "age": ("{name} is {} years old.", "{name} is {}.", "{name}, {} years old."),
    "city": ("{name} lives in {}.", "{name} is in {}."),
    "country": ("{name} is from {}.", "{name} comes from {}."),
    "job": ("{name} works as a {}.", "{name} is a {}."),
    "birthday": ("{name} was born on {}.",),
}
"""What is said of a third person, by the kind."""
REQUESTS = (
    "Extract the {keys} as JSON: {text}", "Give me the {keys} as JSON. {text}", "{text} Answer as JSON with the keys {quoted}.",
    "Extract {quoted} from this text: {text}", "Return JSON with {quoted}: {text}", "Extract: {text}", "Extract as JSON: {text}",
)  # fmt: skip
SYSTEMS = (
    "",
    "",
    "System: Answer in JSON.\n\n",
    "System: Return only JSON.\n\n",
    "System: You are a helpful assistant.\n\n",
)
BY_NAME = {kind.name: kind for kind in KINDS}
OF_OTHERS = [BY_NAME[name] for name in THIRD]


def key(kind: Kind) -> str:
    """The key of a kind: `favorite color` becomes `favorite_color`."""
    return kind.name.replace("'s name", "").replace(" ", "_").lower()


def value(found: Fact) -> int | str:
    """A number where the kind is one."""
    return int(found.en) if found.kind.name in NUMBERS else found.en


def as_json(facts: list[Fact]) -> str:
    """The facts as an object."""
    return json.dumps({key(found.kind): value(found) for found in facts}, ensure_ascii=False)


def _facts(rng: Random, draw: Callable[[], list[Kind]], held: bool) -> list[Fact]:
    """Facts on the asked side of the split; some kinds have too few values for both sides, so kinds are drawn anew."""
    while True:
        facts = [fact(rng, kind) for kind in draw()]
        if held_out(chat.key(facts)) == held:
            return facts


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def extraction(rng: Random, *, held: bool = False) -> tuple[str, str]:
    """A request to take facts from sentences, of the user or of a third person, and its answer."""
    if rng.random() < 0.5:
        facts = _facts(rng, lambda: [BY_NAME["name"], *rng.sample(OF_OTHERS, rng.randint(1, 2))], held)
        said = [pick(rng, THIRD[found.kind.name]).format(found.en, name=facts[0].en) for found in facts[1:]]
    else:
        facts = _facts(rng, lambda: rng.sample(KINDS, rng.randint(1, 3)), held)
        said = [pick(rng, found.kind.told).format(found.en) for found in facts]
        said = [line if line[-1] in ".!?" else f"{line}." for line in said]
    asked = pick(rng, REQUESTS).format(
        keys=_listed([found.kind.name for found in facts]),
        quoted=_listed([f'"{key(found.kind)}"' for found in facts]),
        text=" ".join(said),
    )
    return asked, as_json(facts)


def _from_talk(rng: Random) -> list[tuple[str, str]]:
    facts = _facts(rng, lambda: rng.sample(KINDS, rng.randint(1, 3)), held=False)
    turns = []
    for found in facts:
        turn = chat.telling(rng, [found], chinese=False)
        turns.append((turn.user, turn.answer))
    if rng.random() < 0.3:
        small = chat.small_talk(rng, chinese=False)
        turns.append((small.user, small.answer))
    some = rng.sample(facts, rng.randint(1, len(facts)))
    asked = pick(
        rng,
        (
            "Give me my {keys} as JSON.", "Return my {keys} as JSON.", "Answer as JSON with the keys {quoted}.",
            "What do you know about me? Answer as JSON with {quoted}.", "Tell me my {keys}. Answer in JSON.",
        ),
    )  # fmt: skip
    keys = _listed([found.kind.name for found in some])
    quoted = _listed([f'"{key(found.kind)}"' for found in some])
    return [*turns, (asked.format(keys=keys, quoted=quoted), as_json(some))]


def _short(rng: Random) -> tuple[str, str]:
    if rng.random() < 0.5:
        pair = fresh_pair(rng)
        if rng.random() < 0.5:
            request = pick(
                rng,
                ("Translate into Chinese as JSON: {}", 'Translate to Chinese, answer as JSON with "translation": {}'),
            )
            return request.format(pair.en), json.dumps({"translation": pair.zh}, ensure_ascii=False)
        request = pick(
            rng, ("Translate into English as JSON: {}", 'Translate to English, answer as JSON with "translation": {}')
        )
        return request.format(pair.zh), json.dumps({"translation": pair.en}, ensure_ascii=False)
    one, other, sign, result = arithmetic.sum_(rng)
    symbol, word, _ = arithmetic.SIGNS[sign]
    request = pick(
        rng,
        (
            "What is {} {} {}? Answer in JSON.",
            "Calculate {} {} {} and answer as JSON.",
            'Give "result" of {} {} {} as JSON.',
        ),
    )
    return request.format(one, pick(rng, (symbol, word)), other), json.dumps({"result": result})


def document(rng: Random) -> Document:
    """A request with its answer, or a talk that ends in one. Before a grammar there is no room for a blank: seldom one."""
    draw = rng.random()
    script = [extraction(rng)] if draw < 0.5 else _from_talk(rng) if draw < 0.8 else [_short(rng)]
    system = pick(rng, SYSTEMS)
    think = pick(rng, chat.THINKS) if rng.random() < 0.6 else None
    turns = []
    for asked, answer in script:
        opening, rest = think or ("", " ")
        bare = answer.startswith("{") and rest.isspace() and rng.random() < 0.6
        turns.append((f"{system}User: {asked}\n\nAssistant:{opening}", answer if bare else f"{rest}{answer}"))
        system = ""
    return rounds(turns)
