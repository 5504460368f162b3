"""What all CUDA graphs of steps share: how one is recorded, and how the host's part of a step reaches the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from native.transfer import copy_on

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
    """Named arrays in one block of memory on each device, where graphs find them; the host fills them once a step."""

    def __init__(
        self,
        lengths: Mapping[str, int],
        devices: Sequence[torch.device],
        depth: int,
        dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        """`depth`: steps on their way at once; `dtypes` of those that are not int64."""
        places, size = {}, 0
        for name, length in lengths.items():
            dtype = (dtypes or {}).get(name, torch.int64)
            places[name] = (size, length * dtype.itemsize, dtype)
            size += -(-length * dtype.itemsize // ALIGNMENT) * ALIGNMENT

        def views(block: Tensor) -> dict[str, Tensor]:
            return {name: block[at : at + count].view(dtype) for name, (at, count, dtype) in places.items()}

        self._blocks = [torch.empty(size, dtype=torch.uint8, device=device) for device in devices]
        self._staging = [torch.empty(size, dtype=torch.uint8).pin_memory() for _ in range(depth + 2)]
        self._hosts = [{name: view.numpy() for name, view in views(staging).items()} for staging in self._staging]
        self._events = [[torch.cuda.Event() for _ in devices] for _ in range(depth + 2)]
        self._turn = 0
        self.on_device = [views(block) for block in self._blocks]
        """of each device, by name"""

    @contextmanager
    def filling(self) -> Iterator[dict[str, Array]]:
        """The host's arrays: fill what the step reads of them. When the block ends, copies to all devices are on their
        way, on their current streams."""
        self._turn = (self._turn + 1) % len(self._staging)
        for event in self._events[self._turn]:
            event.synchronize()
        yield self._hosts[self._turn]
        for block, event in zip(self._blocks, self._events[self._turn], strict=True):
            stream = torch.cuda.current_stream(block.device)
            copy_on(stream, block, self._staging[self._turn])
            event.record(stream)
