"""Counts random loads that change a text's bits.

A case reads a text in random pieces, next to random other rows, in random slots. Compared with the same text alone, one
token per step: the logits after the last token and the state, bit for bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from rwkv_batch.model.step_inputs import StepInputs, step_inputs
from rwkv_batch.runner.pipeline import Stage

FIRST_SLOT = 2
LOADS_PER_TEXT = 8
LONGEST_TEXT = 48
NUM_EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class Load:
    """How a text is read: one step per piece."""

    cut: str
    """how its pieces were chosen"""
    pieces: list[int]
    """tokens of the text per step"""
    others: list[list[int]]
    """tokens of each other row, per step"""
    singles_first: bool
    """rows of one token come first, as in mixed steps of a GPU; else rows are in any order"""


@dataclass(frozen=True, slots=True)
class Result:
    """Logits [V] after a text's last token, and its state."""

    logits: Tensor
    state: tuple[Tensor, Tensor]


def random_load(rng: Random, length: int, most_rows: int) -> Load:
    """Return a load for a text of this many tokens.

    A step has at most `most_rows` rows and four times as many other tokens.
    """
    cut = rng.choice(("whole", "tokens", "prompt, then tokens", "anywhere", "by 16"))
    ends = {
        "whole": [],
        "tokens": list(range(1, length)),
        "prompt, then tokens": list(range(rng.randint(1, length), length)),
        "anywhere": sorted(rng.sample(range(1, length), rng.randint(0, length - 1))),
        "by 16": list(range(16, length, 16)),
    }[cut]
    pieces = [end - start for start, end in zip([0, *ends], [*ends, length], strict=True)]
    counts = (0, rng.randint(1, 7), rng.randint(1, 63), rng.randrange(most_rows))
    others = []
    for _ in pieces:
        longest = rng.choice((1, 1, 3, 40))
        count = min(rng.choice(counts), most_rows - 1, 4 * most_rows // longest)
        others.append([rng.randint(1, longest) for _ in range(count)])
    return Load(cut, pieces, others, rng.random() < 0.5)


@torch.inference_mode()
def read(stage: Stage, text: list[int], load: Load, rng: Random, vocab: int) -> Result:
    """Read a text from the zero state under a load."""
    assert stage.state is not None
    device, slots = stage.precision.device, range(FIRST_SLOT, stage.state.num_slots)
    done, slot, row = 0, 0, 0
    logits = torch.empty(0)
    for length, others in zip(load.pieces, load.others, strict=True):
        rows = [[rng.randrange(1, vocab) for _ in range(other)] for other in others]
        row = rng.randint(0, len(rows))
        rows.insert(row, text[done : done + length])
        writes = rng.sample([one for one in slots if one != slot], len(rows))
        reads = [rng.choice((0, one)) for one in writes]
        if slot and rng.random() < 0.5:  # a step may read and write one slot
            writes[row] = slot
        reads[row] = slot
        order = list(range(len(rows)))
        if load.singles_first:
            order.sort(key=lambda i: len(rows[i]) > 1)
        with_logits = rng.random() < 0.5
        inputs = step_inputs(
            [rows[i] for i in order],
            [reads[i] for i in order],
            [writes[i] for i in order],
            list(range(len(order))) if with_logits else [order.index(row)],
        )
        if load.singles_first:
            inputs.single_rows = sum(len(one) == 1 for one in rows)
        logits = _forward(stage, inputs.to(device))[order.index(row) if with_logits else 0].clone()
        done, slot = done + length, writes[row]
    return Result(logits, (stage.state.wkv[slot].clone(), stage.state.shift[slot].clone()))


def _forward(stage: Stage, inputs: StepInputs) -> Tensor:
    x, _ = stage.forward(stage.embed(inputs.tokens), None, inputs)
    return stage.logits(x, inputs)


def cases(stage: Stage, number: int, most_rows: int, vocab: int, seed: int) -> Iterator[tuple[Load, Result, Result]]:
    """Yield each case's load, its result, and the text's alone."""
    stage.allocate_slots(FIRST_SLOT + most_rows + 1)
    for case in range(number):
        rng = Random(f"{seed} {case}")
        if case % LOADS_PER_TEXT == 0:
            text = [
                rng.randrange(1, vocab) for _ in range(rng.choice((rng.randint(1, 8), rng.randint(9, LONGEST_TEXT))))
            ]
            alone = read(stage, text, Load("alone", [1] * len(text), [[]] * len(text), False), rng, vocab)
        load = random_load(rng, len(text), most_rows)
        yield load, read(stage, text, load, rng, vocab), alone


def count_differences(stage: Stage, number: int, most_rows: int, vocab: int, seed: int = 0) -> dict[str, Any]:
    """Return how many of `number` cases differ, and in what.

    Also by which cut, and the first examples.
    """
    counts: Counter[str] = Counter()
    total: Counter[str] = Counter()
    examples: list[dict[str, Any]] = []
    largest = 0.0
    for load, one, alone in cases(stage, number, most_rows, vocab, seed):
        differs = {
            "logits": not torch.equal(one.logits, alone.logits),
            "WKV state": not torch.equal(one.state[0], alone.state[0]),
            "token-shift state": not torch.equal(one.state[1], alone.state[1]),
        }
        counts.update(what for what, is_different in differs.items() if is_different)
        total[load.cut] += 1
        if not any(differs.values()):
            continue
        counts.update(("any", f"cut: {load.cut}"))
        largest = max(largest, float((one.logits - alone.logits).abs().max()))
        if len(examples) < NUM_EXAMPLES:
            examples.append(
                asdict(load) | {"differs": [what for what, is_different in differs.items() if is_different]}
            )
    return {
        "cases": number,
        "differ": dict(counts),
        "cases_by_cut": dict(total),
        "largest_logit_difference": largest,
        "examples": examples,
    }
