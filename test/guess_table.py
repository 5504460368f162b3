"""What `fill_guess_table` does, in plain Python, and random inputs for it."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from rwkv_batch.runner.graphs.guess import CHOSEN, READ, TOKEN, WRITE, Verified


def fill_table(table: Tensor, rows: list[Verified], last: Tensor, after: Tensor, num_slots: int) -> None:
    """Fill in table [steps, 3, R] on the CPU; see `fill_guess_table`."""
    first = 0
    for number, (ring, position, num_guesses, req_slot, tokens) in enumerate(rows):
        sampled = [int(last[req_slot]), *after[first : first + len(tokens)].tolist()]
        first += len(tokens)
        accepted = next((i for i, token in enumerate(tokens) if token != sampled[i]), len(tokens))
        read = min(accepted, num_guesses - 1)
        for step in range(len(table)):
            at = position + read + step
            table[step, READ, number], table[step, WRITE, number] = ring + at % num_slots, ring + (at + 1) % num_slots
            table[step, TOKEN, number] = CHOSEN
        table[0, TOKEN, number] = sampled[read]
        if accepted > read:
            table[1, TOKEN, number] = sampled[accepted]


def random_rows(rng: random.Random, num_rows: int, longest: int) -> tuple[list[Verified], Tensor, Tensor]:
    """Return rows, the token after the known ones by request slot, and those after each drafted one.

    Any number of a row's tokens is accepted. The model has read all of them, or it is one behind.
    """
    req_slots = rng.sample(range(2 * num_rows), num_rows)
    last, after, rows = torch.randint(5, 9, (2 * num_rows,)), list[int](), list[Verified]()
    for number, req_slot in enumerate(req_slots):
        count = rng.randint(1, longest)
        num_accepted = rng.randint(0, count)
        sampled = [int(last[req_slot]), *(rng.randint(5, 9) for _ in range(count))]
        tokens = [*sampled[:num_accepted], *([4] * (count - num_accepted))]
        after += sampled[1:]
        rows.append(Verified(2 + 40 * number, rng.randint(0, 1000), count + rng.randint(0, 1), req_slot, tokens))
    return rows, last, torch.tensor(after)
