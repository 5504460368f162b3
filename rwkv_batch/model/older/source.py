"""Where a layer's tensors come from: what `loader.LayerLoader` offers to the versions."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from rwkv_batch.model.layer import Norm
from rwkv_batch.model.linear import Linear

SQUARE = ("receptance", "key", "value", "output")


class TensorSource(Protocol):
    """Tensors of a weight file, by name, on a stage's device and in its types. Raises KeyError."""

    def has(self, name: str) -> bool:
        """Whether the file has it."""
        ...

    def vector(self, name: str) -> Tensor:
        """Flat, fp32: [C]."""
        ...

    def norm(self, name: str) -> Norm:
        """Its `.weight` and `.bias`, fp32."""
        ...

    def linear(self, name: str, transpose: bool = False) -> Linear:
        """A matrix [out, in], or [in, out] with `transpose`."""
        ...

    def linears(self, name: str, transpose: bool = False) -> list[Linear]:
        """Several matrices kept as one tensor [number, out, in], or [number, in, out] with `transpose`."""
        ...


def square_maps(source: TensorSource, att: str) -> dict[str, Linear]:
    """The four maps [C, C] that the time mix of every version has, by the fields' names."""
    return {name: source.linear(f"{att}.{name}.weight") for name in SQUARE}
