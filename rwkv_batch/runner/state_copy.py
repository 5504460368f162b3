"""The pipeline's slots as the state pool sees them: states copied to and from host memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from native.transfer import copy_pieces
from rwkv_batch.model.state_arena import StateArena
from rwkv_batch.model.state_format import find_invalid
from rwkv_batch.runner.pipeline import Pipeline
from state_pool.layout import HostState, InvalidStateValues


class HostTensors:
    """One state in (pinned) host memory. Implements `state_pool.layout.HostState`."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        """Tensors by part, of the arena's layout: "stage0.wkv" [layers, H, 64, 64] or as its form
        has it, "stage0.shift" [layers, 2, C]."""
        self.tensors = tensors

    def parts(self) -> dict[str, memoryview]:
        """Name -> raw bytes; valid when the copy that fills them is done."""
        return {name: t.reshape(-1).view(torch.uint8).numpy().data for name, t in self.tensors.items()}


class StateCopy:
    """A copy under way; keep it until it is done. Implements `state_pool.layout.Copy`."""

    def __init__(self, host: HostTensors, events: list[torch.cuda.Event]) -> None:
        """Where the parts go or come from, and what is recorded behind them on each device."""
        self.host = host
        self._events = events

    def is_done(self) -> bool:
        """Whether the bytes have arrived."""
        return all(event.query() for event in self._events)

    def wait(self) -> None:
        """Block until they have."""
        for event in self._events:
            event.synchronize()


class PipelineArena:
    """Implements `state_pool.layout.Arena` over all stages. Engine thread only."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._arenas: list[StateArena] = []
        for stage in pipeline.stages:
            assert stage.state is not None, "allocate_slots comes first"
            self._arenas.append(stage.state)
        self.num_slots = self._arenas[0].num_slots
        self.state_bytes = pipeline.slot_bytes
        self.fingerprint = pipeline.weights.fingerprint
        self.vocab = pipeline.weights.shape.vocab
        self.layout = {
            name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape[1:])) for name, tensor in self._parts()
        }
        self._forms = {f"stage{i}.wkv": arena.form for i, arena in enumerate(self._arenas)}
        """of the parts that are recurrent states"""
        self._streams = {
            tensor.device: torch.cuda.Stream(tensor.device) for _, tensor in self._parts() if tensor.is_cuda
        }

    def _parts(self) -> list[tuple[str, Tensor]]:
        """Part name -> all slots of it, [num_slots, …]."""
        parts: list[tuple[str, Tensor]] = []
        for i, arena in enumerate(self._arenas):
            parts += [(f"stage{i}.wkv", arena.wkv), (f"stage{i}.shift", arena.shift)]
        return parts

    def save(self, slot: int) -> StateCopy:
        """See `Arena.save`. The copy runs beside the steps, after those already launched."""
        tensors: dict[str, Tensor] = {}
        for name, part in self._parts():
            tensors[name] = torch.empty(part.shape[1:], dtype=part.dtype, pin_memory=part.is_cuda)
            with self._copy_stream(part):
                copy_pieces(tensors[name], part[slot])
        return StateCopy(HostTensors(tensors), self._events())

    def load(self, slot: int, host: HostState) -> StateCopy:
        """See `Arena.load`. Steps launched from now on see the state."""
        if not isinstance(host, HostTensors):
            raise TypeError(f"a state to load comes from save or host_state, not from {type(host).__name__}")
        for name, part in self._parts():
            with self._copy_stream(part):
                copy_pieces(part[slot], host.tensors[name])
        events = self._events()
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)
        return StateCopy(host, events)

    def _copy_stream(self, part: Tensor) -> torch.cuda.StreamContext:
        """The copying stream of the part's device, made to wait for the steps launched so far."""
        if not part.is_cuda:
            return torch.cuda.stream(None)
        stream = self._streams[part.device]
        stream.wait_stream(torch.cuda.current_stream(part.device))
        return torch.cuda.stream(stream)

    def _events(self) -> list[torch.cuda.Event]:
        return [stream.record_event() for stream in self._streams.values()]

    def tuned_state(self, wkv: Tensor) -> HostTensors:
        """A state to begin from, of wkv [layers, H, 64 (value), 64 (key)] fp32; the token shifts are zero. Any thread.

        Raises ValueError for numbers that the slots' form does not hold.
        """
        tensors: dict[str, Tensor] = {}
        first = 0
        for name, part in self._parts():
            form = self._forms.get(name)
            if form is None:
                piece = torch.zeros(part.shape[1:], dtype=part.dtype)
            else:
                piece = form.pack(wkv[first : first + part.shape[1]])
                first += part.shape[1]
                if form.find_invalid(piece):
                    raise ValueError(
                        f"the state has numbers too large for {form.display_name}; start with --wkv-state fp32"
                    )
            tensors[name] = piece.pin_memory() if self._streams else piece
        return HostTensors(tensors)

    def host_state(self, parts: Mapping[str, bytes | memoryview]) -> HostTensors:
        """See `Arena.host_state`."""
        tensors: dict[str, Tensor] = {}
        for name, (dtype, shape) in self.layout.items():
            kind: torch.dtype = getattr(torch, dtype)
            wanted = kind.itemsize * torch.Size(shape).numel()
            stored = parts.get(name)
            if stored is None or len(stored) != wanted:
                has = "nothing" if stored is None else f"{len(stored)} bytes"
                raise ValueError(f"state part {name!r}: {has} stored, {wanted} bytes expected ({dtype} {shape})")
            tensor = torch.frombuffer(bytearray(stored), dtype=kind).view(shape)
            form = self._forms.get(name)
            if found := find_invalid(tensor) if form is None else form.find_invalid(tensor):
                raise InvalidStateValues(f"part {name!r} of the state has {found}: whatever goes on from it is noise")
            tensors[name] = tensor.pin_memory() if self._streams else tensor
        return HostTensors(tensors)
