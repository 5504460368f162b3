"""Prepares a tuning: the model, its memory, and the results before and after."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from native.heap import keep_freed_blocks
from native.machine import free_memory
from native.priority import cores
from rwkv_batch.errors import StartupError
from rwkv_batch.model.adapters.files import read_adapter, split_scale
from rwkv_batch.model.adapters.merge import merge_adapters
from rwkv_batch.model.loader import LargestInputs
from rwkv_batch.model.quant.formats import format_of
from rwkv_batch.model.state import RWKV7
from rwkv_batch.model.tensor_files import FileError
from rwkv_batch.model.weights import Weights, expected_shapes, open_weights
from rwkv_batch.tuning import Document
from rwkv_batch.tuning.cpu import CpuTrainingModel, unavailable_reason
from rwkv_batch.tuning.model import FUSED_BYTES, MemoryPlan, TrainingModel, activation_bytes, load_model
from rwkv_batch.tuning.pacing import Pacer
from rwkv_batch.tuning.products import compact_matrices, has_triton, matrix_bytes
from rwkv_batch.tuning.trainer import BOTH, FULL, LORA, STATE, TuneOptions, Tuning, batch_shape

_ADAM_COPIES = 5
"""Tuned numbers in memory, fp32 each: themselves, their gradients, two moments, and the best ones so far."""
_HEAD_ROWS = 256
_PIECES = (8192, 4096)
"""Tokens that a GPU trains on at once: the larger if no layer is computed again for it, and the run is not paced."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tuning runs."""

    device: torch.device
    dtype: torch.dtype
    """of the matrices and their products"""

    @property
    def free_bytes(self) -> int | None:
        """Memory that is free there; None: unknown."""
        return torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else free_memory()


def choose_place(device: str) -> Place:
    """Return the device (auto: the first GPU, else the CPU) and its dtype. Raises StartupError."""
    name = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        found = torch.device(name)
        if found.type not in ("cpu", "cuda"):
            raise RuntimeError("a model is tuned on a CPU or an NVIDIA GPU")
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        raise StartupError(
            f"--device {device} cannot be used ({str(error).splitlines()[0]}); give cpu or cuda:0"
        ) from error
    return Place(found, torch.bfloat16 if found.type == "cuda" else torch.float32)


def configure_process(place: Place, threads: int) -> None:
    """Set the process's CPU threads (0: all cores), and for a CPU its heap, for a GPU its fp32 products."""
    torch.set_num_threads(threads or cores())
    if place.device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    else:
        keep_freed_blocks()


def open_model(path: str, adapters: Sequence[str]) -> Weights:
    """Open an RWKV-7 model with adapters merged, each FILE or FILE:SCALE. Raises StartupError."""
    weights = open_weights(path)
    if weights.shape.version != RWKV7:
        raise StartupError(f"{path} is {weights.shape.version}; only RWKV-7 models can be tuned")
    try:
        return merge_adapters(weights, [read_adapter(*split_scale(entry)) for entry in adapters])
    except FileError as error:
        raise StartupError(str(error)) from error


def plan_memory(
    weights: Weights, options: TuneOptions, place: Place, rows: int, row_tokens: int, free: int | None,
    is_paced: bool = False,
) -> MemoryPlan:  # fmt: skip
    """Return the fastest plan that fits into `free` bytes, or the smallest one. None: as much as is needed."""
    shape = weights.shape
    itemsize = 4 if options.method == FULL else place.dtype.itemsize
    tuned = {
        STATE: shape.layers * math.prod(shape.wkv),
        LORA: shape.layers * options.rank * (8 * shape.width + 2 * (shape.width + shape.ffn)),
        FULL: sum(math.prod(size) for size in expected_shapes(shape).values()),
    }
    tuned[BOTH] = tuned[STATE] + tuned[LORA]
    logits = 3 * 4 * _HEAD_ROWS * shape.vocab
    fixed = matrix_bytes(shape, format_of(options.dtype), itemsize) + tuned[options.method] * 4 * _ADAM_COPIES + logits
    if not is_fused(place, options):
        keeping, recomputing = (
            fixed + rows * row_tokens * activation_bytes(shape, recomputes, place.dtype.itemsize)
            for recomputes in (False, True)
        )
        is_small = free is None or keeping <= free // 2
        return MemoryPlan(keeping) if is_small else MemoryPlan(recomputing, 0, shape.layers)
    numbers = FUSED_BYTES[place.dtype is torch.bfloat16][LORA in options.method]
    kept, again, passing = (shape.width * number for number in numbers)
    smallest = None
    for tokens in _PIECES[is_paced:]:
        piece_rows = min(rows, max(1, tokens // row_tokens))
        count = piece_rows * row_tokens
        for layers in range(shape.layers + 1):
            activations = count * ((shape.layers - layers) * kept + layers * again + passing + (kept if layers else 0))
            smallest = MemoryPlan(fixed + activations, piece_rows, layers)
            if free is None or smallest.needed_bytes <= free * 0.95:
                return smallest
            if tokens != _PIECES[-1]:
                break
    assert smallest is not None, "there are sizes of pieces"
    return smallest


def is_fused(place: Place, options: TuneOptions) -> bool:
    """Return whether fused functions train: states and LoRAs, in bf16 on an NVIDIA GPU or in fp32 on a CPU."""
    if options.method == FULL:
        return False
    if place.device.type == "cpu":
        return place.dtype is torch.float32 and unavailable_reason() is None
    return place.device.type == "cuda" and place.dtype is torch.bfloat16 and has_triton()


def _model_kind(place: Place, options: TuneOptions) -> type[TrainingModel]:
    if not is_fused(place, options):
        return TrainingModel
    if place.device.type == "cpu":
        return CpuTrainingModel
    from rwkv_batch.tuning.gpu.model import GpuTrainingModel  # needs Triton

    return GpuTrainingModel


def prepare(
    weights: Weights,
    documents: Sequence[Document],
    held_out: Sequence[Document],
    options: TuneOptions,
    place: Place,
    checkpoint: Path | None,
    pacer: Pacer | None = None,
    largest_inputs: LargestInputs | None = None,
) -> Tuning:
    """Load the model and the checkpoint, if there is one. Raises StartupError, also if memory is too small.

    largest_inputs: for matrices in int8
    """
    format_ = format_of(options.dtype)
    if format_ is not None and options.method == FULL:
        raise StartupError(f"--method full changes all weights, which cannot stay {format_}; omit --dtype")
    largest = max(max(one.ids) for one in [*documents, *held_out])
    if largest >= weights.shape.vocab:
        raise StartupError(f"the data has token {largest}, the model has {weights.shape.vocab}; use another model")
    rows, row_tokens = batch_shape(documents, held_out, options, place.device)
    free = place.free_bytes
    plan = plan_memory(weights, options, place, rows, row_tokens, free, pacer is not None)
    if free is not None and plan.needed_bytes > free:
        raise StartupError(
            f"the tuning needs about {plan.needed_bytes / 2**30:.1f} GiB on {place.device}, {free / 2**30:.1f} GiB are "
            "free; lower --batch-tokens, shorten the lines, or use a smaller model"
        )
    compact = {} if format_ is None else compact_matrices(weights, format_, place.device, largest_inputs)
    kind = _model_kind(place, options)
    model = load_model(weights, place.device, place.dtype, options.method == FULL, kind, compact)
    model.plan, model.pacer = plan, pacer
    digest = hashlib.blake2b(digest_size=16)
    for one in [*documents, *held_out]:
        digest.update(f"{[*one.ids]}{[*one.weights]};".encode())
    identity = f"{weights.sample_digest} {weights.adapters} {digest.hexdigest()} {len(held_out)}"
    return Tuning(model, documents, held_out, options, place.dtype, identity, checkpoint)


def measure_step_s(tuning: Tuning) -> float:
    """Return the seconds of a training step, measured on the first batch. Nothing is trained."""
    batch = tuning.first_batch()
    seconds = []
    for _ in range(2):
        began = time.monotonic()
        tuning.trainer.backward(batch)
        if tuning.trainer.model.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.monotonic() - began)
    return min(seconds)
