"""Quality cost of each dtype. Takes any model file and any text file.

    python -m bench.quality                                             # the demo model, held-out sentences
    python -m bench.quality --model-path FILE --text-file FILE --device cuda:0
    python -m bench.quality --wkv-states fp16 int8 --max-tokens 32768   # WKV state formats instead of dtypes
    python -m bench.quality --outliers 20                               # 8 channels of each norm 20 times as large

Compares with the same model in fp32, over the text with teacher forcing:
- bits per byte of the text, and their increase over fp32
- KL of the next-token distributions, in nats per token
- error of the logits: ||y - true|| / ||true||
- same: share of positions with the same most likely token
- agreement: share of 1,000 tokens, generated greedily by fp32, that the dtype also ranks first; and the position of
  the first difference

With --wkv-states: the same figures for state formats, per quarter of --texts texts, one token at a time
(quality_states.py). Without a text file the texts are documents of the demo's corpus.

Bound: memory. fp32 weights of 7.2B take 29 GB of a GPU in addition to the dtype's own. The `--out` file is written
after each result. The last line is JSON with the same content.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from bench.quality_states import Compared, Text, by_state_format, long_texts
from bench.tools.record import Arguments, finish, save
from demo.corpus import translation
from demo.files import ensure_model
from rwkv_batch.model.state import StateFormat
from rwkv_batch.model.step_inputs import StepInputs
from rwkv_batch.model.weights import Weights, WeightsError, open_weights
from rwkv_batch.runner.pipeline import Pipeline, resolve_device
from rwkv_batch.tokenizer import Tokenizer

INT8_16 = "int8-16"
"""int8 with --activation-bits 16"""
DTYPES = ("bf16", "fp16", "fp8", "int8", INT8_16, "int4")
CHUNK = 256
SLOT = 2


class Reader:
    """A model that reads texts from the zero state."""

    def __init__(self, weights: Weights, device: str, dtype: str) -> None:
        takes_any = not device.startswith("cuda")  # a GPU has fp16 and quantised kernels only
        kernels = "naive" if dtype in ("fp32", "bf16") and not takes_any else "auto"
        dtype, bits = ("int8", 16) if dtype == INT8_16 else (dtype, 8)
        self.pipeline = Pipeline(weights, (device,), dtype, kernels, "fp32", activation_bits=bits)
        self.pipeline.allocate_slots(SLOT + 2)
        self.slot = SLOT

    def with_own_slot(self) -> Reader:
        """Return a reader of the same model with its own state slot."""
        with_own_slot = copy.copy(self)
        with_own_slot.slot = self.slot + 1
        return with_own_slot

    def logits(self, ids: list[int]) -> Iterator[Tensor]:
        """Yield fp32 logits [T, V] of each chunk."""
        for start in range(0, len(ids), CHUNK):
            chunk = torch.tensor(ids[start : start + CHUNK])
            slots = torch.tensor([self.slot])
            ends = torch.tensor([0, len(chunk)])
            read = slots if start else torch.zeros_like(slots)
            yield self.pipeline.forward(StepInputs(chunk, ends, read, slots, torch.arange(len(chunk)), len(chunk)))

    def write(self, prompt: list[int], count: int) -> list[int]:
        """Return `count` greedily generated tokens."""
        *_, last = self.logits(prompt)
        ids, slots = [int(last[-1].argmax())], torch.tensor([self.slot])
        for _ in range(count - 1):
            inputs = StepInputs(torch.tensor(ids[-1:]), torch.tensor([0, 1]), slots, slots, torch.tensor([0]), 1)
            ids.append(int(self.pipeline.forward(inputs)[0].argmax()))
        return ids


def with_outliers(weights: Weights, factor: int) -> Weights:
    """Return the model with 8 random channels of each layer norm `factor` times as large."""
    generator, changes = torch.Generator().manual_seed(5), dict(weights.changes)
    for i in range(weights.shape.layers):
        for norm in ("ln1", "ln2"):
            scale = torch.ones(weights.shape.width)
            scale[torch.randperm(weights.shape.width, generator=generator)[:8]] = factor
            changes |= {f"blocks.{i}.{norm}.{part}": scale.mul for part in ("weight", "bias")}
    return dataclasses.replace(weights, changes=changes, adapters=(*weights.adapters, f"outliers {factor}"))


def compare(reader: Reader, reference: Reader, text: Text) -> dict[str, float]:
    """Compare a model with the reference over a text."""
    compared = Compared()
    for i, (logits, true) in enumerate(zip(reader.logits(text.ids), reference.logits(text.ids), strict=True)):
        following = torch.tensor(text.ids[i * CHUNK + 1 : (i + 1) * CHUNK + 1], device=logits.device)
        compared.add(logits[: len(following)], true.to(logits.device)[: len(following)], following)
    return compared.figures(text)


def agreement(reader: Reader, prompt: list[int], written: list[int]) -> dict[str, float]:
    """Return the share of reference tokens that the model ranks first.

    Also returns the position of the first difference.
    """
    own = torch.cat([logits.argmax(-1) for logits in reader.logits([*prompt, *written[:-1]])]).cpu()
    same = own[len(prompt) - 1 :] == torch.tensor(written)
    return {
        "agreement": same.float().mean().item(),
        "first_difference": len(written) if bool(same.all()) else int(same.int().argmin()),
    }


def by_dtype(weights: Weights, reference: Reader, args: argparse.Namespace, text: Text) -> Iterator[dict[str, Any]]:
    """Yield the figures of fp32 and each dtype."""
    prompt = text.ids[:32]
    written = reference.write(prompt, args.written)
    names = "dtype", "bits_per_byte", "kl", "logits_error", "same_token", "agreement", "first_difference"
    print("  ".join(f"{name:>14}" for name in names), flush=True)
    for dtype in ("fp32", *args.dtypes):
        reader = reference.with_own_slot() if dtype == "fp32" else Reader(weights, args.device, dtype)
        row = {"dtype": dtype, **compare(reader, reference, text), **agreement(reader, prompt, written)}
        print(_line(row, names), flush=True)
        yield row


def held_out_text() -> str:
    """Return translated sentence pairs that the demo model was not trained on."""
    rng = Random("quality")
    pairs = [translation.fresh_pair(rng, held=True) for _ in range(40)]
    return "\n\n".join(f"{translation.prompt(pair.en, english=True)} {pair.zh}" for pair in pairs)


def _line(row: dict[str, Any], names: tuple[str, ...]) -> str:
    return "  ".join(f"{row[name]:>14.5g}" if isinstance(row[name], float) else f"{row[name]:>14}" for name in names)


def at_least(lowest: int) -> Callable[[str], int]:
    """Return a parser of whole numbers >= `lowest`. The parser raises ArgumentTypeError."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < lowest:
            raise argparse.ArgumentTypeError(f"must be a whole number, {lowest} or more, got {text!r}")
        return int(text)

    return parse


def device_name(text: str) -> str:
    """Return a device of this machine. Raises ArgumentTypeError."""
    try:
        return str(resolve_device(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).replace("--pp-devices", "--device")) from None


def parse_arguments() -> argparse.Namespace:
    parser = Arguments(__doc__)
    parser.add_argument("--model-path", type=Path, help="a .pth or .safetensors file; without it the demo model")
    parser.add_argument("--text-file", type=Path, help="UTF-8; without it held-out sentences of the demo's corpus")
    parser.add_argument("--device", type=device_name, default="cpu")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16", "fp8", "int8", "int4"])
    parser.add_argument("--max-tokens", type=at_least(2), default=2048, help="of the text")
    parser.add_argument("--written", type=at_least(1), default=1000, help="tokens for the agreement")
    parser.add_argument("--wkv-states", nargs="+", type=StateFormat, choices=list(StateFormat), default=[])
    parser.add_argument("--texts", type=at_least(1), default=2, help="batch size with --wkv-states")
    parser.add_argument("--outliers", type=at_least(1), help="factor of 8 channels of each layer norm")
    return parser.parse_args()


def text_of(path: Path) -> str:
    """Return a file's text. Raises SystemExit if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"--text-file {path} cannot be read ({error}); give a file of text in UTF-8") from None


def read_text(args: argparse.Namespace) -> Text:
    """Return the first tokens of the text and their number of bytes."""
    tokenizer = Tokenizer()
    whole = text_of(args.text_file) if args.text_file else held_out_text()
    ids = tokenizer.encode(whole)[: args.max_tokens]
    if len(ids) < 2:
        raise SystemExit(f"{args.text_file} holds {len(ids)} tokens; give a text of at least 2")
    return Text(ids, sum(len(tokenizer.byte_table[i]) for i in ids[1:]))


def main() -> None:
    args = parse_arguments()
    try:
        weights = open_weights(args.model_path or ensure_model())
    except WeightsError as error:
        raise SystemExit(str(error)) from None
    if args.outliers:
        weights = with_outliers(weights, args.outliers)
    if args.wkv_states:
        compare_states(weights, args)
        return
    text = read_text(args)
    reference = Reader(weights, args.device, "fp32")
    record = about(weights, args) | {"tokens": len(text.ids), "results": []}
    for row in by_dtype(weights, reference, args, text):
        save_row(record, record["results"], row, args.out)
    finish(record, args.out)


def about(weights: Weights, args: argparse.Namespace) -> dict[str, Any]:
    """Return what both kinds of records begin with."""
    model = {"model": weights.path.name, "shape": weights.shape.describe(), "device": args.device}
    return model | {"outliers": args.outliers or 1}


def compare_states(weights: Weights, args: argparse.Namespace) -> None:
    """Compare WKV state formats instead of dtypes of the weights."""
    count, length = args.texts, args.max_tokens
    if args.text_file is None:
        texts = long_texts(count, length)
    else:
        ids = Tokenizer().encode(text_of(args.text_file))
        length = min(length, len(ids) // count - 1)
        if length < 4:
            raise SystemExit(f"{args.text_file} holds {len(ids)} tokens; {count} texts need at least 5 each")
        texts = torch.tensor(ids[: count * (length + 1)]).view(count, length + 1)
    record = about(weights, args) | {"texts": count, "tokens": length, "states": []}
    names = "wkv_state", "quarter", "bits_per_byte", "kl", "logits_error", "same_token"
    print("  ".join(f"{name:>14}" for name in names), flush=True)
    formats = [state_format for state_format in args.wkv_states if state_format is not StateFormat.FP32]
    for row in by_state_format(weights, args.device, formats, texts):
        print(_line(row, names), flush=True)
        save_row(record, record["states"], row, args.out)
    finish(record, args.out)


def save_row(record: dict[str, Any], rows: list[dict[str, Any]], row: dict[str, Any], out: Path | None) -> None:
    """Add a row and write the file: an interrupted run keeps its results."""
    rows.append(row)
    save(record, out)


if __name__ == "__main__":
    main()
