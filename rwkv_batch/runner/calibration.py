"""Measures the inputs of a model's matrices, for `--dtype int8`. The model reads a short built-in text."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from rwkv_batch.kernels.naive import NaiveOps
from rwkv_batch.model.layer import Linear, layer_norm
from rwkv_batch.model.loader import LayerLoader, Precision
from rwkv_batch.model.quant.formats import Format, is_quantised
from rwkv_batch.model.quant.store import QuantStore
from rwkv_batch.model.rwkv7 import forward_layers
from rwkv_batch.model.state import RWKV7, StateArena, StateFormat
from rwkv_batch.model.step_inputs import step_inputs
from rwkv_batch.model.weights import Weights
from rwkv_batch.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

TEXT = Path(__file__).with_name("calibration.txt")
"""Passages in English, Chinese and code, separated by form feeds."""
FILE = "calibration"
FIRST_SLOT = 2
"""Slots 0 and 1 are reserved."""


class MeasuredInputs:
    """The largest absolute input of each channel of a model's quantised matrices.

    Measured at the first call, with the same text for every model, and kept next to the quantised weights. Versions
    before RWKV-7 are not measured: all their channels count as equal.
    """

    def __init__(self, weights: Weights, device: torch.device) -> None:
        self._weights = weights
        self._device = device
        self._by_name: dict[str, Tensor] | None = None

    def __call__(self, name: str) -> Tensor:
        """Return the matrix's largest inputs, [in] fp32."""
        if self._weights.shape.version != RWKV7:
            return torch.ones(self._weights.tensors[name].shape[1])
        if self._by_name is None:
            store = QuantStore(self._weights.path, self._weights.fingerprint, Format.W8A8)
            self._by_name = store.load_tensors(FILE)
            if self._by_name is None or name not in self._by_name:
                logger.info("measuring the inputs of %s for int8, once", self._weights.path.name)
                self._by_name = measure(self._weights, self._device)
                store.save_tensors(FILE, self._by_name)
        return self._by_name[name]


class _Recorded(Linear):
    def __init__(self, plain: Linear) -> None:
        super().__init__(plain.weight)
        self.x_max = torch.zeros(plain.weight.shape[1], device=plain.weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        self.x_max = torch.maximum(self.x_max, x.abs().amax(0).float())
        return super().__call__(x)


class _RecordingLoader(LayerLoader):
    """Loads layers. Its quantisable maps record their inputs."""

    recorded: dict[str, _Recorded]

    def linear(self, name: str, transpose: bool = False) -> Linear:
        plain = super().linear(name, transpose)
        if not is_quantised(name):
            return plain
        self.recorded[name] = _Recorded(plain)
        return self.recorded[name]


def measure(weights: Weights, device: torch.device) -> dict[str, Tensor]:
    """Run the text through the model. One layer is in memory at a time. Returns [in] fp32 on the CPU by matrix name."""
    plain = torch.float16 if device.type == "cuda" else torch.float32
    precision = Precision(device, plain, torch.float32, StateFormat.FP32)
    loader = _RecordingLoader(weights, precision)
    encode = Tokenizer().encode
    passages = [encode(text.strip()) for text in TEXT.read_text("utf-8").split("\f")]
    slots = list(range(FIRST_SLOT, FIRST_SLOT + len(passages)))
    inputs = step_inputs(passages, [0] * len(passages), slots, []).to(device)
    embedding = loader.embedding()
    assert embedding.ln0 is not None, "RWKV-7 files have ln0"
    tokens = inputs.tokens.to(embedding.table.device) % len(embedding.table)  # random models may have fewer tokens
    x = layer_norm(embedding.table[tokens].to(device), embedding.ln0)
    v_first, ops = None, NaiveOps()
    largest: dict[str, Tensor] = {}
    for i in tqdm(range(weights.shape.layers), "measuring inputs", file=sys.stderr, disable=None, leave=False):
        loader.recorded = {}
        state = StateArena(FIRST_SLOT + len(passages), 1, weights.shape, device, StateFormat.FP32, torch.float32)
        x, v_first = forward_layers([loader.layer(i)], x, v_first, state, inputs, ops)
        largest |= {name: linear.x_max.cpu() for name, linear in loader.recorded.items()}
    head = layer_norm(x, loader.norm("ln_out"))
    return largest | {"head.weight": head.abs().amax(0).cpu()}
