"""What a linear map applies to its outputs, by the numbers of native/csrc/activation.h."""

from __future__ import annotations

import enum


class Activation(enum.IntEnum):
    """Applied to each output on its own."""

    NONE = 0
    TANH = 1
    SIGMOID = 2
    RELU_SQUARED = 3
    """max(x, 0) squared"""
    SIGNED_SQUARE = 4
    """x |x|, on a GPU: what max(., 0) makes RELU_SQUARED of, and from which x is had back"""
