"""Captures CUDA graphs of stages and replays them: input arrays, recorders, and the links between stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from native.tensors import Copier
from rwkv_batch.model.step_inputs import StepInputs
from rwkv_batch.runner.links import Link
from rwkv_batch.runner.pipeline import Stage

WARM_UP_RUNS = 2
TIMED_RUNS = 3
ALIGNMENT = 16
Array = np.ndarray[Any, Any]


class CaptureError(RuntimeError):
    """A step could not be captured, usually for lack of memory. Nothing of the step has run."""


class Recorder:
    """Captures steps on one device. Their graphs share memory, so they must replay on one stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        """one stream for all captures, because cuBLAS keeps a workspace for every stream"""
        self.is_recording = False
        self.seconds = 0.0
        """of a run of the last graph"""

    @torch.inference_mode()
    def record(self, step: Callable[[], None], name: str) -> torch.cuda.CUDAGraph:
        """Capture a step as a graph, and measure it. Runs it with harmless inputs. Raises CaptureError."""
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
                graph.replay()
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                for _ in range(TIMED_RUNS):
                    graph.replay()
                end.record()
                end.synchronize()
            self.seconds = begin.elapsed_time(end) / TIMED_RUNS / 1000
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
        """by device and name"""

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
        """Record that the step is launched on all devices, in order. The step reads the arrays."""
        if self._awaits_use:
            self._used[self._ring_index].record(self._streams[-1])
            self._awaits_use = False


EXTRA_LINK_DEPTH = 2
"""Link buffers beyond the steps in flight: one being written, one being read."""


class GraphStage:
    """A stage, its recorder, and the input that the previous stage sends."""

    def __init__(self, stage: Stage, before: GraphStage | None, max_tokens: int, depth: int) -> None:
        """max_tokens: of a step; depth: steps in flight."""
        self.stage = stage
        self.device = stage.precision.device
        self.recorder = Recorder(self.device)
        self._current = torch.cuda.device(self.device)
        self._input: Tensor | None = None
        """[2 * tokens * C]: x, then v_first"""
        self._output: Tensor | None = None
        """for the next stage"""
        self._link: Link | None = None
        if before is not None:
            size, dtype = 2 * max_tokens * stage.width, stage.precision.activations
            self._input = torch.empty(size, dtype=dtype, device=self.device)
            before._output = torch.empty(size, dtype=dtype, device=before.device)
            self._link = Link(before.device, self.device, size, dtype, depth + EXTRA_LINK_DEPTH)

    @property
    def link_kind(self) -> str | None:
        """How values come from the previous stage. None for the first stage."""
        return None if self._link is None else self._link.transport

    def forward(self, inputs: StepInputs, tokens: Tensor | None) -> Tensor:
        """Inside a graph: run the layers over tokens [T] or over the previous stage's output.

        Returns x [T, C], and keeps it for the next stage.
        """
        if tokens is not None:
            x, v_first = self.stage.forward(self.stage.embed(tokens), None, inputs)
        else:
            x, v_first = self.stage.forward(*self._both(self._input, len(inputs.tokens)), inputs)
        if self._output is not None:
            assert v_first is not None
            for target, values in zip(self._both(self._output, len(x)), (x, v_first), strict=True):
                target.copy_(values)
        return x

    def _both(self, memory: Tensor | None, tokens: int) -> tuple[Tensor, Tensor]:
        assert memory is not None
        both = memory[: 2 * tokens * self.stage.width].view(2, tokens, self.stage.width)
        return both[0], both[1]

    def run(self, replay: Callable[[], None], tokens: int, before: GraphStage | None) -> None:
        """Replay a graph over this many tokens after the previous stage. Does not wait."""
        if self._link is not None and before is not None:
            assert before._output is not None and self._input is not None
            size = 2 * tokens * self.stage.width
            self._link.receive(self._link.send(before._output, size), self._input, size)
        replay()  # runs on the graph's device, not on the current one

    def current(self) -> AbstractContextManager[None]:
        """Return a context in which the stage's GPU is the current device."""
        return self._current


def make_graph_stages(stages: Sequence[Stage], max_tokens: int, depth: int) -> list[GraphStage]:
    """Create a GraphStage for each stage. The stages are linked."""
    created: list[GraphStage] = []
    for stage in stages:
        created.append(GraphStage(stage, created[-1] if created else None, max_tokens, depth))
    return created


def run_stages(
    graph_stages: Sequence[GraphStage], graphs: Sequence[torch.cuda.CUDAGraph], tokens: int, staged: StagedArrays
) -> None:
    """Replay a step's graphs, one per stage. They read the arrays in `staged`."""
    before = None
    for graph_stage, graph in zip(graph_stages, graphs, strict=True):
        graph_stage.run(graph.replay, tokens, before)
        before = graph_stage
    staged.mark_used()
