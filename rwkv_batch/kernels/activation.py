"""Activations of linear layers, numbered as in native/csrc/activation.h."""

from __future__ import annotations

import enum


class Activation(enum.IntEnum):
    NONE = 0
    TANH = 1
    SIGMOID = 2
    RELU_SQUARED = 3
    """max(x, 0) squared"""
    SIGNED_SQUARE = 4
    """x |x|, GPU only: max(., 0) of it is RELU_SQUARED, and x can be recovered"""
