"""Rows in two bytes (csrc/rows_two_byte.cuh) in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 32639


def bytes_of(halves: Tensor, group: int = 128) -> tuple[Tensor, Tensor]:
    """Quantise fp16 [rows, k] to bytes and their scales.

    Bytes: [rows, 2, k] int8. Scales: [k / group, pitch, 2] fp32.
    """
    rows = len(halves)
    grouped = halves.float().unflatten(1, (-1, group))
    largest = grouped.abs().amax(2, keepdim=True)
    inverse = torch.where(largest > 0, LARGEST / largest, 0.0)
    numbers = torch.nan_to_num(grouped * inverse).round().long()
    first = (numbers + 128) >> 8
    found = torch.stack([first, numbers - 256 * first], dim=1).flatten(2).to(torch.int8)
    scales = torch.full((halves.shape[1] // group, rows + rows % 2, 2), torch.nan, device=halves.device)
    scale = (largest / LARGEST).squeeze(2)
    scales[:, :rows, 0] = scale.T
    scales[:, :rows, 1] = (-128.0 * scale * numbers.sum(2)).T
    return found, scales


def numbers_of(found: Tensor, scales: Tensor) -> Tensor:
    """Return the integers of bytes [rows, 2, k], per group of `scales`: [rows, k / group, group] int64."""
    return (256 * found[:, 0].long() + found[:, 1].long()).unflatten(1, (len(scales), -1))


def meaning(found: Tensor, scales: Tensor) -> Tensor:
    """Return the values [rows, k] fp32."""
    meant: Tensor = numbers_of(found, scales).float() * scales[:, : len(found), 0].T.unsqueeze(2)
    return meant.flatten(1)


def assert_stands_for(found: Tensor, scales: Tensor, halves: Tensor) -> None:
    """Assert a kernel's bytes: integers off by at most one, because its reciprocals are inexact."""
    rows, numbers = len(found), numbers_of(found, scales)
    expected, items = bytes_of(halves, halves.shape[1] // len(scales))
    assert ((numbers - numbers_of(expected, items)).abs() <= 1).all()
    torch.testing.assert_close(scales[:, :rows, 0], items[:, :rows, 0], rtol=1e-6, atol=0)
    assert_items_fit(found, scales)


def assert_items_fit(found: Tensor, scales: Tensor) -> None:
    """Assert each group's sum of 128 * integer next to its scale. A group's largest integer is 32639."""
    rows, numbers = len(found), numbers_of(found, scales)
    added = -128 * scales[:, :rows, 0].double() * numbers.sum(2).T
    torch.testing.assert_close(scales[:, :rows, 1].double(), added, rtol=1e-6, atol=0)
    largest = numbers.abs().amax(2)
    assert ((largest == LARGEST) | (largest == 0)).all()
