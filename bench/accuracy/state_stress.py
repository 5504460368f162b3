"""How far states of few bits stray from the truth, whatever the model: heads of all decays over long random texts.

    python -m bench.accuracy.state_stress                        # 32,768 tokens, fp16 and int8 beside fp64
    python -m bench.accuracy.state_stress --tokens 4096 --forms int8

Each head has one decay for all of its channels, drawn around it for each token; r, k, v, the removal key kk (of
length one) and its rate a are random. After each token the state is brought into its form, as while a row decodes.
Told are the relative errors ||y - true|| / ||true|| of the outputs y = S r of the last tokens, the truth being the
same in fp64, without removal (a = 0: a decay near one keeps what came thousands of tokens ago) and with it (a around
a half).

What bounds it: nothing is timed. Models are not made of random numbers: what theirs lose, `bench.quality --wkv-states`
tells of a text. The last line is JSON; `--out` keeps it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rwkv_batch.model.layer import HEAD_SIZE
from rwkv_batch.model.state_form import StateForm, pack_int8, unpack_int8

DECAYS = (0.9, 0.99, 0.999, 0.9999, 0.99999)
HEADS = 2
"""Of each decay."""
MEASURED = 512
"""Last tokens whose outputs are compared."""


class KeptState:
    """States [heads, 64, 64] that are brought into a form after every token."""

    def __init__(self, form: StateForm, heads: int) -> None:
        self.form = form
        self.numbers = torch.zeros(heads, HEAD_SIZE, HEAD_SIZE)
        self._packed = pack_int8(self.numbers)

    def put(self, numbers: Tensor) -> None:
        """What the token left, [heads, 64, 64] fp32."""
        if self.form is StateForm.INT8:
            self._packed = pack_int8(numbers, self._packed)
            self.numbers = unpack_int8(self._packed)
        else:
            self.numbers = self.form.unpack(self.form.pack(numbers))


def random_tokens(count: int, seed: int) -> Iterator[dict[str, Tensor]]:
    """r, decay, k, v, kk, rate of each token, [heads, 64] fp32; rate is of the removal, a."""
    generator = torch.Generator().manual_seed(seed)
    rates = torch.tensor(DECAYS).repeat_interleave(HEADS).unsqueeze(1)
    for _ in range(count):
        normal = torch.randn(4, len(rates), HEAD_SIZE, generator=generator)
        spread = torch.rand(2, len(rates), HEAD_SIZE, generator=generator)
        kk = torch.nn.functional.normalize(normal[3], dim=-1)
        decay = 1 - (1 - rates) * (0.5 + spread[0])
        yield {"r": normal[0], "decay": decay, "k": normal[1], "v": normal[2], "kk": kk, "rate": spread[1]}


def after(state: Tensor, token: dict[str, Tensor], removes: bool) -> Tensor:
    """The state [heads, 64, 64] after a token, in the type of the state."""
    decay, k, v, kk, rate = (token[name].to(state.dtype) for name in ("decay", "k", "v", "kk", "rate"))
    new = state * decay.unsqueeze(-2) + v.unsqueeze(-1) * k.unsqueeze(-2)
    return new - (state @ kk.unsqueeze(-1)) * (kk * rate).unsqueeze(-2) if removes else new


def stray(forms: list[StateForm], num_tokens: int, removes: bool, seed: int) -> list[dict[str, Any]]:
    """Relative errors of each form and decay."""
    heads = HEADS * len(DECAYS)
    true = torch.zeros(heads, HEAD_SIZE, HEAD_SIZE, dtype=torch.float64)
    kept = {form: KeptState(form, heads) for form in forms}
    off = {form: torch.zeros(heads, dtype=torch.float64) for form in forms}
    size = torch.zeros(heads, dtype=torch.float64)
    for at, token in enumerate(random_tokens(num_tokens, seed)):
        true = after(true, token, removes)
        for state in kept.values():
            state.put(after(state.numbers, token, removes))
        if at < num_tokens - MEASURED:
            continue
        r = token["r"].double().unsqueeze(-1)
        wanted = true @ r
        size += wanted.square().sum((-2, -1))
        for form, state in kept.items():
            off[form] += (state.numbers.double() @ r - wanted).square().sum((-2, -1))
    rows = []
    for form in forms:
        errors = (off[form].view(-1, HEADS).sum(1) / size.view(-1, HEADS).sum(1)).sqrt().tolist()
        for decay, error in zip(DECAYS, errors, strict=True):
            rows.append({"wkv_state": form.value, "removes": removes, "decay": decay, "error": round(error, 5)})
    return rows


def parse_arguments() -> argparse.Namespace:
    """Flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--forms", nargs="+", type=StateForm, choices=list(StateForm), default=list(StateForm))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a file for the last line")
    return parser.parse_args()


@torch.inference_mode()
def main() -> None:
    """Run and print."""
    args = parse_arguments()
    rows: list[dict[str, Any]] = []
    for removes in (False, True):
        for row in stray(args.forms, args.tokens, removes, args.seed):
            print(json.dumps(row), flush=True)
            rows.append(row)
    known = json.dumps({"tokens": args.tokens, "heads": HEADS, "measured": MEASURED, "results": rows})
    print(known)
    if args.out:
        args.out.write_text(known + "\n")


if __name__ == "__main__":
    main()
