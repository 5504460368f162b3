"""Copies states between pipeline slots and host memory, for the state pool."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from native.tensors import copy_pieces
from rwkv_batch.model.state import StateArena, find_invalid
from rwkv_batch.runner.pipeline import Pipeline
from state_pool.layout import HostState, InvalidStateValues


class HostTensors:
    """One state in (pinned) host memory. Implements `HostState` of the state pool."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        """tensors: by part, in the arena's layout: "stage0.wkv" [layers, H, 64, 64] or as its format has it,
        "stage0.shift" [layers, 2, C]
        """
        self.tensors = tensors

    def parts(self) -> dict[str, memoryview]:
        """Raw bytes by part name, valid after the copy that fills them."""
        return {name: t.reshape(-1).view(torch.uint8).numpy().data for name, t in self.tensors.items()}


class StateCopy:
    """Keep it until it is done. Implements `Copy` of the state pool."""

    def __init__(self, host: HostTensors, events: list[torch.cuda.Event]) -> None:
        """host: source or target; events: recorded after the copy on each device."""
        self.host = host
        self._events = events

    def is_done(self) -> bool:
        return all(event.query() for event in self._events)

    def wait(self) -> None:
        for event in self._events:
            event.synchronize()


class PipelineArena:
    """Slots of all stages. Implements the state pool's `Arena`. Engine thread only."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._arenas: list[StateArena] = []
        for stage in pipeline.stages:
            assert stage.state is not None, "call allocate_slots first"
            self._arenas.append(stage.state)
        self.num_slots = self._arenas[0].num_slots
        self.state_bytes = pipeline.slot_bytes
        self.fingerprint = pipeline.weights.fingerprint
        self.vocab = pipeline.weights.shape.vocab
        self.layout = {
            name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape[1:])) for name, tensor in self._parts()
        }
        self._formats = {f"stage{i}.wkv": arena.form for i, arena in enumerate(self._arenas)}
        """formats of the parts that are recurrent states"""
        self._streams = {
            tensor.device: torch.cuda.Stream(tensor.device) for _, tensor in self._parts() if tensor.is_cuda
        }

    def _parts(self) -> list[tuple[str, Tensor]]:
        """Return the tensor of each part's slots, [num_slots, ...] by part name."""
        parts: list[tuple[str, Tensor]] = []
        for i, arena in enumerate(self._arenas):
            parts += [(f"stage{i}.wkv", arena.wkv), (f"stage{i}.shift", arena.shift)]
        return parts

    def save(self, slot: int) -> StateCopy:
        """See `Arena.save`. The copy waits for launched steps and runs alongside later ones."""
        tensors: dict[str, Tensor] = {}
        for name, part in self._parts():
            tensors[name] = torch.empty(part.shape[1:], dtype=part.dtype, pin_memory=part.is_cuda)
            with self._copy_stream(part):
                copy_pieces(tensors[name], part[slot])
        return StateCopy(HostTensors(tensors), self._events())

    def load(self, slot: int, host: HostState) -> StateCopy:
        """See `Arena.load`. Steps launched after this call see the state. Raises TypeError for a foreign HostState."""
        if not isinstance(host, HostTensors):
            raise TypeError(f"load takes a state of save or host_state, not {type(host).__name__}")
        for name, part in self._parts():
            with self._copy_stream(part):
                copy_pieces(part[slot], host.tensors[name])
        events = self._events()
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)
        return StateCopy(host, events)

    def _copy_stream(self, part: Tensor) -> torch.cuda.StreamContext:
        """Return the device's copy stream. The stream waits for the steps launched so far."""
        if not part.is_cuda:
            return torch.cuda.stream(None)
        stream = self._streams[part.device]
        stream.wait_stream(torch.cuda.current_stream(part.device))
        return torch.cuda.stream(stream)

    def _events(self) -> list[torch.cuda.Event]:
        return [stream.record_event() for stream in self._streams.values()]

    def tuned_state(self, wkv: Tensor) -> HostTensors:
        """Build an initial state from `wkv`. Any thread.

        `wkv` is [layers, H, 64 (value), 64 (key)] fp32. Token shifts are zero. Raises ValueError for numbers that the
        slots' format cannot hold.
        """
        tensors: dict[str, Tensor] = {}
        first = 0
        for name, part in self._parts():
            state_format = self._formats.get(name)
            if state_format is None:
                piece = torch.zeros(part.shape[1:], dtype=part.dtype)
            else:
                piece = state_format.pack(wkv[first : first + part.shape[1]])
                first += part.shape[1]
                if state_format.find_invalid(piece):
                    raise ValueError(
                        f"the state has numbers too large for {state_format.display_name}; start with --wkv-state fp32"
                    )
            tensors[name] = piece.pin_memory() if self._streams else piece
        return HostTensors(tensors)

    def host_state(self, parts: Mapping[str, bytes | memoryview]) -> HostTensors:
        """See `Arena.host_state`. Raises ValueError, InvalidStateValues."""
        tensors: dict[str, Tensor] = {}
        for name, (dtype, shape) in self.layout.items():
            torch_dtype: torch.dtype = getattr(torch, dtype)
            expected = torch_dtype.itemsize * torch.Size(shape).numel()
            stored = parts.get(name)
            if stored is None or len(stored) != expected:
                size = "nothing" if stored is None else f"{len(stored)} bytes"
                raise ValueError(f"state part {name!r}: {size} stored, {expected} bytes expected ({dtype} {shape})")
            tensor = torch.frombuffer(bytearray(stored), dtype=torch_dtype).view(shape)
            state_format = self._formats.get(name)
            if found := find_invalid(tensor) if state_format is None else state_format.find_invalid(tensor):
                raise InvalidStateValues(f"part {name!r} of the state has {found}; a continuation would be noise")
            tensors[name] = tensor.pin_memory() if self._streams else tensor
        return HostTensors(tensors)
