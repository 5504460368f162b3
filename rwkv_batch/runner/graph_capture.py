"""What all CUDA graphs of steps share: how one is recorded, and how the host's part of a step reaches the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from native.transfer import Copier

WARM_UP_RUNS = 2
ALIGNMENT = 16
Array = np.ndarray[Any, Any]


class CaptureError(RuntimeError):
    """A step could not be recorded, most likely for want of memory; nothing of it has run."""


class Recorder:
    """Records steps on one device. They work in the same memory, so their replays follow each other on one stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        """all graphs are captured on it: cuBLAS keeps a work space for every stream it has seen"""
        self.is_recording = False

    @torch.inference_mode()
    def record(self, step: Callable[[], None], name: str) -> torch.cuda.CUDAGraph:
        """The step as a graph, after it has run twice. What it works on must be harmless. Raises CaptureError."""
        graph = torch.cuda.CUDAGraph()
        try:
            torch.cuda.synchronize(self._device)
            self.is_recording = True
            # Entering the stream makes its device current, and leaving brings back what was, whatever happens.
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UP_RUNS):
                    step()
                self._stream.synchronize()
                # thread_local: what the pool's threads allocate meanwhile is no part of it
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    step()
        except RuntimeError as error:
            raise CaptureError(f"{name} could not be captured: {_reason(error)}") from error
        finally:
            self.is_recording = False
        return graph


def _reason(error: BaseException) -> str:
    """What went wrong first: ending a broken capture raises another error over it."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


class StagedArrays:
    """Named arrays in one block of memory on each device, where graphs find them; the host fills them once a step.

    What a step reads is filled into memory of the host that is used again some steps later: with one device when that
    has its copy, with several when the step's work on the last one is done, since all have their copies by then.
    """

    def __init__(
        self,
        lengths: Mapping[str, int],
        devices: Sequence[torch.device],
        depth: int,
        dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        """`devices` in the order of the stages; `depth`: steps on their way at once, each in two parts at most;
        `dtypes` of those that are not int64."""
        places, size = {}, 0
        for name, length in lengths.items():
            dtype = (dtypes or {}).get(name, torch.int64)
            places[name] = (size, length * dtype.itemsize, dtype)
            size += -(-length * dtype.itemsize // ALIGNMENT) * ALIGNMENT

        def views(block: Tensor) -> dict[str, Tensor]:
            return {name: block[at : at + count].view(dtype) for name, (at, count, dtype) in places.items()}

        self._blocks = [torch.empty(size, dtype=torch.uint8, device=device) for device in devices]
        self._staging = [torch.empty(size, dtype=torch.uint8).pin_memory() for _ in range(2 * depth + 2)]
        self._hosts = [{name: view.numpy() for name, view in views(staging).items()} for staging in self._staging]
        self._size = size
        self._streams = [torch.cuda.current_stream(device) for device in devices]
        self._copiers = [Copier(stream) for stream in self._streams]
        self._used = [torch.cuda.Event() for _ in self._staging]
        self._ring_index = 0
        self._awaits_use = False
        """whether several devices' were filled and no step that reads them has been launched"""
        self.on_device = [views(block) for block in self._blocks]
        """of each device, by name"""

    @contextmanager
    def filling(self) -> Iterator[dict[str, Array]]:
        """The host's arrays: fill what the step reads of them. When the block ends, copies to all devices are on their
        way, on the streams that were the current ones when this was made. With several devices `mark_used` follows,
        when the step that reads them is launched."""
        if self._awaits_use:  # there was none: a graph was captured, or a launch has failed
            for stream in self._streams:
                stream.synchronize()
        self._ring_index = (self._ring_index + 1) % len(self._staging)
        self._used[self._ring_index].synchronize()
        yield self._hosts[self._ring_index]
        for block, copier in zip(self._blocks, self._copiers, strict=True):
            copier.copy(block, self._staging[self._ring_index], self._size)
        self._awaits_use = len(self._blocks) > 1
        if not self._awaits_use:
            self._used[self._ring_index].record(self._streams[0])

    def mark_used(self) -> None:
        """The step that reads what was filled in last is launched on all devices, each behind the one before."""
        if self._awaits_use:
            self._used[self._ring_index].record(self._streams[-1])
            self._awaits_use = False
