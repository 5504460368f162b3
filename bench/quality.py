"""What each dtype costs in quality: any model file, any text file.

    python -m bench.quality                                             # the demo model, held-out sentences
    python -m bench.quality --model-path FILE --text-file FILE --device cuda:0
    python -m bench.quality --wkv-states fp16 int8 --max-tokens 32768   # forms of the WKV state instead of dtypes

Against the same model in fp32, over the text (a token at a time is predicted from those before it):
- bits per byte of the text, and what the dtype adds to it
- KL: of the next-token distributions, nats a token; error: of the logits, ||y - true|| / ||true||; same: share of
  positions with the same most likely token
- agreement: of 1,000 tokens that fp32 writes greedily, how many each dtype would have written there too, and after how
  many its own text would first have differed
Then, for each small format, the same KL with one kind of matrix in it and all others in fp32, and how far the matrices
themselves are off. That is what decides which matrices take small formats (rwkv_batch/model/quant/formats.py).

With --wkv-states the same figures for forms of the state, by quarter of --texts texts that are read side by side, a
token at a time (quality_states.py); without a text file they are documents of the demo's mixture one after the other.

What bounds it: nothing is timed. With fp32 weights kept on a GPU, memory: 7.2B needs 29 GB beside the dtype's own.
The file of `--out` holds all that is known so far, from the first dtype on. The last line is JSON, the same.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from bench.quality_states import Compared, Text, by_state_form, long_texts
from demo.corpus import translation
from demo.files import ensure_model
from rwkv_batch.model.quant.formats import Format, dequantise, is_quantised, quantise
from rwkv_batch.model.state_format import StateFormat
from rwkv_batch.model.step_inputs import StepInputs
from rwkv_batch.model.weights import Weights, WeightsError, open_weights
from rwkv_batch.runner.pipeline import Pipeline, resolve_device
from rwkv_batch.tokenizer import Tokenizer

DTYPES = ("bf16", "fp16", "fp8", "int8", "int4")
CHUNK = 256
SLOT = 2


class Reader:
    """A model that reads texts from the zero state."""

    def __init__(self, weights: Weights, device: str, dtype: str) -> None:
        takes_any = not device.startswith("cuda")  # else fp16 and codes
        kernels = "naive" if dtype in ("fp32", "bf16") and not takes_any else "auto"
        self.pipeline = Pipeline(weights, (device,), dtype, kernels, "fp32")
        self.pipeline.allocate_slots(SLOT + 2)
        self.slot = SLOT

    def twin(self) -> Reader:
        """The same model, reading a text of its own."""
        twin = copy.copy(self)
        twin.slot = self.slot + 1
        return twin

    def logits(self, ids: list[int]) -> Iterator[Tensor]:
        """fp32 [T, V] after each token of one chunk after the other."""
        for at in range(0, len(ids), CHUNK):
            chunk = torch.tensor(ids[at : at + CHUNK])
            slots = torch.tensor([self.slot])
            ends = torch.tensor([0, len(chunk)])
            read = slots if at else torch.zeros_like(slots)
            yield self.pipeline.forward(StepInputs(chunk, ends, read, slots, torch.arange(len(chunk)), len(chunk)))

    def write(self, prompt: list[int], count: int) -> list[int]:
        """So many tokens, the most likely one each time."""
        *_, last = self.logits(prompt)
        ids, slots = [int(last[-1].argmax())], torch.tensor([self.slot])
        for _ in range(count - 1):
            inputs = StepInputs(torch.tensor(ids[-1:]), torch.tensor([0, 1]), slots, slots, torch.tensor([0]), 1)
            ids.append(int(self.pipeline.forward(inputs)[0].argmax()))
        return ids


def compare(reader: Reader, reference: Reader, text: Text) -> dict[str, float]:
    """A model beside the reference over a text."""
    compared = Compared()
    for at, (logits, true) in enumerate(zip(reader.logits(text.ids), reference.logits(text.ids), strict=True)):
        following = torch.tensor(text.ids[at * CHUNK + 1 : (at + 1) * CHUNK + 1], device=logits.device)
        compared.take(logits[: len(following)], true.to(logits.device)[: len(following)], following)
    return compared.figures(text)


def agreement(reader: Reader, prompt: list[int], written: list[int]) -> dict[str, float]:
    """How much of what the reference wrote the model would have written."""
    own = torch.cat([logits.argmax(-1) for logits in reader.logits([*prompt, *written[:-1]])]).cpu()
    same = own[len(prompt) - 1 :] == torch.tensor(written)
    return {
        "agreement": same.float().mean().item(),
        "first_difference": len(written) if bool(same.all()) else int(same.int().argmin()),
    }


def by_dtype(weights: Weights, reference: Reader, args: argparse.Namespace, text: Text) -> Iterator[dict[str, Any]]:
    """fp32 and each dtype asked for, one after the other."""
    prompt = text.ids[:32]
    written = reference.write(prompt, args.written)
    names = "dtype", "bits_per_byte", "kl", "logits_error", "same_token", "agreement", "first_difference"
    print("  ".join(f"{name:>14}" for name in names), flush=True)
    for dtype in ("fp32", *args.dtypes):
        reader = reference.twin() if dtype == "fp32" else Reader(weights, args.device, dtype)
        row = {"dtype": dtype, **compare(reader, reference, text), **agreement(reader, prompt, written)}
        print(_line(row, names), flush=True)
        yield row


def by_kind(weights: Weights, reference: Reader, device: str, text: Text) -> Iterator[dict[str, Any]]:
    """Each format and kind of matrix by itself."""
    names = [name for name in weights.tensors if is_quantised(name)]
    kinds = sorted({kind_of(name) for name in names})
    for format_ in Format:
        for kind in kinds:
            changed, off, size = dict(weights.tensors), 0.0, 0.0
            for name in (name for name in names if kind_of(name) == kind):
                whole = weights.tensors[name].float()
                changed[name] = dequantise(quantise(whole, format_))
                off, size = off + (changed[name] - whole).square().sum().item(), size + whole.square().sum().item()
            reader = Reader(dataclasses.replace(weights, tensors=changed), device, "fp32")
            figures = compare(reader, reference, text)
            row = {"dtype": format_.value, "kind": kind, "matrix_error": math.sqrt(off / size), **figures}
            print(_line(row, ("dtype", "kind", "matrix_error", "kl", "logits_error", "same_token")), flush=True)
            yield row


def kind_of(name: str) -> str:
    """blocks.3.att.key.weight -> att.key"""
    return ".".join(part for part in name.split(".")[:-1] if part != "blocks" and not part.isdecimal())


def held_text() -> str:
    """Sentences in two languages that the demo model has not seen, as translations."""
    rng = Random("quality")
    pairs = [translation.fresh_pair(rng, held=True) for _ in range(40)]
    return "\n\n".join(f"{translation.prompt(pair.en, english=True)} {pair.zh}" for pair in pairs)


def _line(row: dict[str, Any], names: tuple[str, ...]) -> str:
    return "  ".join(f"{row[name]:>14.5g}" if isinstance(row[name], float) else f"{row[name]:>14}" for name in names)


def at_least(lowest: int) -> Callable[[str], int]:
    """A parser of whole numbers from `lowest` on; it raises ArgumentTypeError."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < lowest:
            raise argparse.ArgumentTypeError(f"must be a whole number, {lowest} or more, got {text!r}")
        return int(text)

    return parse


def device_name(text: str) -> str:
    """A device of this machine. Raises ArgumentTypeError."""
    try:
        return str(resolve_device(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).replace("--pp-devices", "--device")) from None


def file_to_write(text: str) -> Path:
    """A file in a folder that is there. Raises ArgumentTypeError."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file in a folder that is there, got {text!r}")
    return path


def parse_arguments() -> argparse.Namespace:
    """Flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", type=Path, help="a .pth or .safetensors file; without it the demo model")
    parser.add_argument("--text-file", type=Path, help="UTF-8; without it held-out sentences of the demo's corpus")
    parser.add_argument("--device", type=device_name, default="cpu")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16", "fp8", "int8", "int4"])
    parser.add_argument("--max-tokens", type=at_least(2), default=2048, help="of the text")
    parser.add_argument("--written", type=at_least(1), default=1000, help="tokens for the agreement")
    parser.add_argument("--wkv-states", nargs="+", type=StateFormat, choices=list(StateFormat), default=[])
    parser.add_argument("--texts", type=at_least(1), default=2, help="read side by side with --wkv-states")
    parser.add_argument("--no-kinds", action="store_true", help="without the table by kind of matrix")
    parser.add_argument(
        "--out", type=file_to_write, help="a file for what is known so far, and in the end for the last line"
    )
    return parser.parse_args()


def text_of(path: Path) -> str:
    """What a file holds. Raises SystemExit, naming it."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"--text-file {path} cannot be read ({error}); give a file of text in UTF-8") from None


def read_text(args: argparse.Namespace) -> Text:
    """The text's first tokens and what they cover."""
    tokenizer = Tokenizer()
    whole = text_of(args.text_file) if args.text_file else held_text()
    ids = tokenizer.encode(whole)[: args.max_tokens]
    if len(ids) < 2:
        raise SystemExit(f"{args.text_file} holds {len(ids)} tokens; a text of at least 2 is wanted")
    return Text(ids, sum(len(tokenizer.byte_table[i]) for i in ids[1:]))


def main() -> None:
    """Read, compare and print."""
    args = parse_arguments()
    try:
        weights = open_weights(args.model_path or ensure_model())
    except WeightsError as error:
        raise SystemExit(str(error)) from None
    if args.wkv_states:
        compare_states(weights, args)
        return
    text = read_text(args)
    reference = Reader(weights, args.device, "fp32")
    known: dict[str, Any] = {
        "model": weights.path.name,
        "shape": weights.shape.describe(),
        "tokens": len(text.ids),
        "device": args.device,
        "results": [],
        "kinds": [],
    }
    for row in by_dtype(weights, reference, args, text):
        keep(known, known["results"], row, args.out)
    if not args.no_kinds:
        for row in by_kind(weights, reference, args.device, text):
            keep(known, known["kinds"], row, args.out)
    print(json.dumps(known))


def compare_states(weights: Weights, args: argparse.Namespace) -> None:
    """Forms of the state instead of dtypes of the weights."""

    count, length = args.texts, args.max_tokens
    if args.text_file is None:
        texts = long_texts(count, length)
    else:
        ids = Tokenizer().encode(text_of(args.text_file))
        length = min(length, len(ids) // count - 1)
        if length < 4:
            raise SystemExit(f"{args.text_file} holds {len(ids)} tokens; {count} texts of at least 5 are wanted")
        texts = torch.tensor(ids[: count * (length + 1)]).view(count, length + 1)
    known: dict[str, Any] = {
        "model": weights.path.name,
        "shape": weights.shape.describe(),
        "texts": count,
        "tokens": length,
        "device": args.device,
        "states": [],
    }
    names = "wkv_state", "quarter", "bits_per_byte", "kl", "logits_error", "same_token"
    print("  ".join(f"{name:>14}" for name in names), flush=True)
    forms = [form for form in args.wkv_states if form is not StateFormat.FP32]
    for row in by_state_form(weights, args.device, forms, texts, lambda line: print(line, flush=True)):
        print(_line(row, names), flush=True)
        keep(known, known["states"], row, args.out)
    print(json.dumps(known))


def keep(known: dict[str, Any], rows: list[dict[str, Any]], row: dict[str, Any], out: Path | None) -> None:
    """One more of the rows of what is known, in the file as well: a run that is ended leaves what it has found."""
    rows.append(row)
    if out:
        out.write_text(json.dumps(known) + "\n")


if __name__ == "__main__":
    main()
