"""Common code of all CUDA graphs of steps: capture, and staging of host arrays."""

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
    """A step could not be captured, usually for lack of memory. Nothing of it has run."""


class Recorder:
    """Captures steps on one device. Their graphs share memory, so they must replay on one stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        """one stream for all captures, because cuBLAS keeps a workspace for every stream"""
        self.is_recording = False

    @torch.inference_mode()
    def record(self, step: Callable[[], None], name: str) -> torch.cuda.CUDAGraph:
        """Capture a step as a graph, after two runs with harmless inputs. Raises CaptureError."""
        graph = torch.cuda.CUDAGraph()
        try:
            torch.cuda.synchronize(self._device)
            self.is_recording = True
            # Restores the current device and stream, also after an error.
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UP_RUNS):
                    step()
                self._stream.synchronize()
                # thread_local: exclude allocations of the state pool's threads.
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    step()
        except RuntimeError as error:
            raise CaptureError(f"{name} could not be captured: {_reason(error)}") from error
        finally:
            self.is_recording = False
        return graph


def _reason(error: BaseException) -> str:
    """Return the first error: ending a broken capture raises another one."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


class StagedArrays:
    """Named arrays in one memory block per device, read by graphs. The host fills them once per step.

    The host buffers form a ring. With one device, a buffer is reused once the device has its copy. With several, once
    the last device has run the step, because all devices have their copies by then.
    """

    def __init__(
        self,
        lengths: Mapping[str, int],
        devices: Sequence[torch.device],
        depth: int,
        dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        """devices: in the order of the stages
        depth: steps in flight, each in at most two launches.
        dtypes: of the arrays that are not int64.
        """
        spans, size = {}, 0
        for name, length in lengths.items():
            dtype = (dtypes or {}).get(name, torch.int64)
            spans[name] = (size, length * dtype.itemsize, dtype)
            size += -(-length * dtype.itemsize // ALIGNMENT) * ALIGNMENT

        def views(block: Tensor) -> dict[str, Tensor]:
            return {name: block[at : at + count].view(dtype) for name, (at, count, dtype) in spans.items()}

        self._blocks = [torch.empty(size, dtype=torch.uint8, device=device) for device in devices]
        self._staging = [torch.empty(size, dtype=torch.uint8).pin_memory() for _ in range(2 * depth + 2)]
        self._hosts = [{name: view.numpy() for name, view in views(staging).items()} for staging in self._staging]
        self._size = size
        self._streams = [torch.cuda.current_stream(device) for device in devices]
        self._copiers = [Copier(stream) for stream in self._streams]
        self._used = [torch.cuda.Event() for _ in self._staging]
        self._ring_index = 0
        self._awaits_use = False
        """whether several devices' arrays were filled but no step was launched"""
        self.on_device = [views(block) for block in self._blocks]
        """per device, by name"""

    @contextmanager
    def filling(self) -> Iterator[dict[str, Array]]:
        """Yield the host's arrays to fill; then copy them to all devices, without waiting.

        Copies run on the streams that were current at construction. With several devices, call `mark_used` after the
        launch.
        """
        if self._awaits_use:  # no launch followed: a capture, or an error
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
        """Record that the step that reads the arrays is launched on all devices, in order."""
        if self._awaits_use:
            self._used[self._ring_index].record(self._streams[-1])
            self._awaits_use = False
