"""The interface through which the versions load tensors (`loader.LayerLoader`)."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from rwkv_batch.model.layer import Norm
from rwkv_batch.model.linear import Linear

SQUARE = ("receptance", "key", "value", "output")


class TensorSource(Protocol):
    """Tensors of a weight file by name, on a stage's device and in its dtypes. Raises KeyError."""

    def has(self, name: str) -> bool:
        """Return whether the file has this tensor."""
        ...

    def vector(self, name: str) -> Tensor:
        """Load a vector [C] as fp32."""
        ...

    def norm(self, name: str) -> Norm:
        """Load `.weight` and `.bias` [C] as fp32."""
        ...

    def linear(self, name: str, transpose: bool = False) -> Linear:
        """Load a matrix [out, in], or [in, out] with `transpose`."""
        ...

    def linears(self, name: str, transpose: bool = False) -> list[Linear]:
        """Load matrices stored as one tensor [number, out, in], or [number, in, out] with `transpose`."""
        ...


def square_maps(source: TensorSource, att: str) -> dict[str, Linear]:
    """Load the four [C, C] maps of every version's time mix, by field name."""
    return {name: source.linear(f"{att}.{name}.weight") for name in SQUARE}
