"""Sizes of a model of any supported version."""

from __future__ import annotations

from dataclasses import dataclass

from rwkv_batch.model.layer import HEAD_SIZE
from rwkv_batch.model.state_format import StateFormat

X070 = "RWKV-7"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model, read from its tensors."""

    layers: int
    width: int
    vocab: int
    ffn: int
    decay_rank: int = 0
    """of RWKV-7 and RWKV-6; 0: no such map"""
    a_rank: int = 0
    v_rank: int = 0
    gate_rank: int = 0
    version: str = X070
    """"RWKV-7", "RWKV-6", "RWKV-5.2", "RWKV-5.1", "RWKV-5.0" or "RWKV-4\""""
    head_size: int = HEAD_SIZE
    mix_rank: int = 0
    """of RWKV-6's token shift"""

    @property
    def heads(self) -> int:
        return self.width // self.head_size

    @property
    def wkv(self) -> tuple[int, ...]:
        """Sizes of a layer's recurrent state: [H, head (value), head (key)]; RWKV-4: [3, C]."""
        return (3, self.width) if self.version == "RWKV-4" else (self.heads, self.head_size, self.head_size)

    def slot_bytes(self, layers: int, form: StateFormat, shift_itemsize: int, first_wkv: int = 0) -> int:
        """Return the bytes of the state of this many layers. first_wkv: see StateArena."""
        return (layers - first_wkv) * form.num_bytes(self.wkv) + layers * 2 * self.width * shift_itemsize

    def describe(self) -> str:
        """Return a one-line description."""
        heads = "" if self.version == "RWKV-4" else f" ({self.heads} heads)"
        return f"{self.version}, {self.layers} layers x {self.width}{heads}, vocabulary {self.vocab}"
