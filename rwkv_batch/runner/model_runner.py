"""The model on its devices with everything a step needs: slots, samplers, the pool. Engine thread only."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from native.transfer import on_device
from rwkv_batch.config import EngineConfig
from rwkv_batch.core.limits import Limits
from rwkv_batch.core.scheduler import ScheduledRow
from rwkv_batch.core.sequence import NO_SLOT, Sequence
from rwkv_batch.errors import StartupError
from rwkv_batch.model.step_inputs import StepInputs, step_inputs
from rwkv_batch.model.weights import WeightsError, open_weights
from rwkv_batch.request import TokenLogprob
from rwkv_batch.runner.decode_graphs import DecodeGraphs, DeviceSampler, LastTokens, padded_sizes
from rwkv_batch.runner.graph_capture import CaptureError
from rwkv_batch.runner.host_copy import HostCopy
from rwkv_batch.runner.mixed_graphs import MixedGraphs, MixedSize, usable_mixed_sizes
from rwkv_batch.runner.pipeline import Pipeline
from rwkv_batch.runner.prefill_graphs import PrefillGraphs, usable_sizes
from rwkv_batch.runner.stage_graphs import graph_stages
from rwkv_batch.runner.state_copy import PipelineArena
from rwkv_batch.tokenizer import Tokenizer
from sampling.registry import COMPILED_AT_FIRST_USE, choose_sampler, order
from sampling.sampler import Logprobs, Sampler
from state_pool.arena import DUMMY_SLOT, FIRST_FREE_SLOT, ZERO_SLOT
from state_pool.errors import DatabaseUnusable
from state_pool.pool import StatePool

logger = logging.getLogger(__name__)

CPU_ROWS = 256
GPU_ROWS = 1024
CPU_PREFILL_TOKENS = 256
GPU_PREFILL_TOKENS = 4096
GPU_PREFILL_BESIDE = 1024
"""As fast per token as more (7.2B on an H200: 26 ms for 8 x 128); rows that decode beside it wait 40 ms, not 110."""
CPU_SLOTS_SHARE = 0.25
"""Share of the machine's memory that slots may take on a CPU."""


@dataclass(slots=True)
class Drawn:
    """What one sampler draws in a step, on its way to the host."""

    members: list[int]
    """which of `Launched.drawing`, in order"""
    copy: HostCopy
    """token ids [n] int64, and log-probabilities (`Logprobs`) where there are any"""
    with_logprobs: bool = False
    places: list[int] | None = None
    """where the members' tokens stand among them; None: there is nothing else"""


@dataclass(slots=True)
class Launched:
    """A step on its way."""

    rows: list[ScheduledRow]
    drawing: list[ScheduledRow]
    draws: list[Drawn] = field(default_factory=list)
    """per sampler"""
    started: float = field(default_factory=time.monotonic)
    launched: float = 0.0
    """when its launch ended"""
    tokens_sent: int = 0
    """number under which what it draws comes to the first device (`LastTokens.bring`)"""


class ModelRunner:
    """Loads the model at construction. Engine thread. Raises StartupError: one line naming the thing and the remedy."""

    def __init__(self, config: EngineConfig, wake: Callable[[], None]) -> None:
        """`wake` is called from the pool's threads when the engine's thread should look at the pool."""
        self._config = config
        if config.threads:
            torch.set_num_threads(config.threads)
        self.tokenizer = Tokenizer()
        try:
            self.weights = open_weights(config.model_path)
            self.pipeline = Pipeline(
                self.weights, config.devices, config.dtype, config.kernels, config.wkv_state, config.layers
            )
        except (WeightsError, ValueError) as error:
            raise StartupError(str(error)) from error
        self.vocab = self.weights.shape.vocab
        self.device = self.pipeline.devices[-1]
        self._gpus = [device for device in dict.fromkeys(self.pipeline.devices) if device.type == "cuda"]
        if len(self._gpus) > 1:
            # In a default stream a copy to another device waits for all work of both, and all later work waits for it.
            for device in self._gpus:
                torch.cuda.set_stream(torch.cuda.Stream(device))
        if self._gpus:
            torch.cuda.set_device(self.device if self.device.type == "cuda" else self._gpus[-1])
            torch.cuda.empty_cache()  # what loading has left over
        self._weight_bytes = {device: torch.cuda.memory_allocated(device) for device in self._gpus}
        self.limits = self._limits()
        self.overlaps = config.overlap and (self.device.type == "cuda" or config.overlap_on_cpu)
        self._allocate_slots()
        try:
            self.pool = StatePool(PipelineArena(self.pipeline), config.pool, wake)
        except DatabaseUnusable as error:
            raise StartupError(str(error)) from error
        self.steps_in_flight = self.limits.groups + self.overlaps
        """launched and not read by the host: a step of each group, and one more where that hides the host"""
        self._samplers: dict[str, Sampler] = {}
        self._makes_sampler = False
        self.sampler_refusals: dict[str, str] = {}
        self.graph_refusal = DecodeGraphs.why_not(self.pipeline.stages, self.sampler(""))
        self._graphs = None if self.graph_refusal else self._make_graphs()
        self._prefill_graphs = None if self._graphs is None else self._make_prefill_graphs(self._graphs)
        self._mixed_graphs = None if self._graphs is None else self._make_mixed_graphs(self._graphs)
        self._tokens = self._graphs.tokens if self._graphs is not None else self._make_last_tokens()
        self._known = 0
        """number under which the tokens of the last step that the host has read come to the first device"""
        self._logits = self._graphs.logits if self._graphs is not None else None
        """[rows, V] where steps leave their logits; None: each in memory of its own"""
        if config.warmup and self.device.type == "cuda":
            self._warm_up()
        logger.info("serving %s: %s on %s", config.model_name, self.weights.shape.describe(), self.device_names())

    def device_names(self) -> list[str]:
        """The stages' devices."""
        return [str(device) for device in self.pipeline.devices]

    # Sizes ---------------------------------------------------------------------------------------------------

    def _limits(self) -> Limits:
        on_gpu = self.device.type == "cuda"
        groups = self._config.micro_batches or self.pipeline.concurrency
        rows = self._config.max_running or self._affordable_rows(GPU_ROWS * groups if on_gpu else CPU_ROWS)
        prefill_tokens = self._config.prefill_tokens_per_step or (GPU_PREFILL_TOKENS if on_gpu else CPU_PREFILL_TOKENS)
        beside = self._config.prefill_tokens_beside or (GPU_PREFILL_BESIDE if on_gpu else prefill_tokens)
        return Limits(
            max_running=rows,
            max_waiting_rows=self._config.max_waiting_rows,
            max_waiting_rows_per_client=self._config.max_waiting_rows_per_client,
            prefill_tokens_per_step=prefill_tokens,
            prefill_chunk=self._config.prefill_chunk,
            prefill_tokens_beside=min(beside, prefill_tokens),
            groups=groups,
        )

    def _affordable_rows(self, wanted: int) -> int:
        """Rows whose slots fit into the memory that is left."""
        shares = {device: self.pipeline.slot_bytes_on(device) for device in set(self.pipeline.devices)}
        device = min(shares, key=lambda device: self._free_bytes(device) // shares[device])
        free, share = self._free_bytes(device), shares[device]
        fitting = free // share - self._parked_slots()
        if fitting < 1:
            raise StartupError(
                f"too little memory: {free >> 20} MiB are left for states on {device}, one takes "
                f"{share >> 20} MiB there and {self._parked_slots()} are set aside; "
                "lower --l1-sessions and --prefix-cache-slots, or use a smaller model"
            )
        return min(wanted, fitting * 8 // 9 or 1)

    def _free_bytes(self, device: torch.device) -> int:
        """Memory of a device that slots may take."""
        if device.type != "cuda":
            return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * CPU_SLOTS_SHARE)
        free, total = torch.cuda.mem_get_info(device)
        return int(free - (1 - self._config.gpu_memory_utilization) * total)

    def _parked_slots(self) -> int:
        return self._config.pool.l1_sessions + self._config.pool.prefix_cache_slots + FIRST_FREE_SLOT

    def _allocate_slots(self) -> None:
        """Slots of running rows, an eighth more for marks and borders, the parked ones, and what sessions take."""
        rows = self.limits.max_running
        slots = rows + max(4, rows // 8) + self._parked_slots()
        shares = {device: self.pipeline.slot_bytes_on(device) for device in set(self.pipeline.devices)}
        fitting = min(self._free_bytes(device) // share for device, share in shares.items())
        slots += min(rows * self._session_slots(), max(0, fitting - slots) // 2)
        self._num_slots = slots
        try:
            self.pipeline.allocate_slots(slots)
        except (RuntimeError, MemoryError) as error:
            raise StartupError(
                f"too little memory for {slots} slots of {self.pipeline.slot_bytes >> 10} KiB ({error}); "
                "lower --max-running"
            ) from error

    def _session_slots(self) -> int:
        """Slots that a session's row takes beside its own, as far as half the memory that is left holds them.

        One holds the state that its turn began with, one in the overlapped loop that of the token before. Paused rows
        use them too.
        """
        return 2 if self.overlaps else 1

    def _make_graphs(self) -> DecodeGraphs:
        sampler = self.sampler("")
        assert isinstance(sampler, DeviceSampler)
        rows, stages = self.limits.rows_in_step, self.pipeline.stages
        mixed = usable_mixed_sizes(rows)
        prompts = usable_sizes(stages, rows)
        most_tokens = max(padded_sizes(rows)[-1], *(size.tokens for size in mixed), *(size.tokens for size in prompts))
        places = graph_stages(stages, most_tokens, self.steps_in_flight)
        drawn = max((size.drawn for size in mixed), default=0)
        return DecodeGraphs(places, rows, sampler, self.limits.num_seats, self.steps_in_flight, drawn)

    def _make_mixed_graphs(self, graphs: DecodeGraphs) -> MixedGraphs:
        sizes = usable_mixed_sizes(self.limits.rows_in_step)
        return MixedGraphs(graphs, sizes, self.steps_in_flight)

    def _make_prefill_graphs(self, graphs: DecodeGraphs) -> PrefillGraphs:
        return PrefillGraphs(graphs.places, graphs.logits, self.steps_in_flight)

    def _make_last_tokens(self) -> LastTokens:
        first, last = self.pipeline.devices[0], self.device
        if first.type != last.type:  # the host carries them
            first = last
        return LastTokens(self.limits.num_seats, first, last, self.steps_in_flight)

    def _warm_up(self) -> None:
        """Run every kind of step once, so that no request waits until a graph, a kernel or memory is made ready.

        Prompts are read from the zero state into the dummy slot: the longest step with all the logits it may want,
        then ever shorter ones. The memory which that takes serves all later steps.
        """
        started = time.perf_counter()
        for name in COMPILED_AT_FIRST_USE:
            self.sampler(name)
        if self._graphs is not None:
            try:
                self._graphs.warm_up()
                for graphs in (self._prefill_graphs, self._mixed_graphs):
                    if graphs is not None:
                        graphs.warm_up()
            except CaptureError as error:
                self._give_up_graphs(error)
        longest, chunk, rows = self.limits.prefill_tokens_per_step, self.limits.prefill_chunk, self.limits.rows_in_step
        beside = 0 if self._graphs is not None else 1  # a token of each row that decodes
        sizes = [2**i for i in reversed(range(longest.bit_length()))]
        steps = [[max(1, longest // rows) + beside] * rows]
        steps += [[min(chunk, size - at) for at in range(0, size, chunk)] for size in sizes]
        try:
            for lengths in steps:
                prompts, count = [[0] * length for length in lengths], len(lengths)
                drawing = list(range(min(count, rows)))
                inputs = step_inputs(prompts, [ZERO_SLOT] * count, [DUMMY_SLOT] * count, drawing)
                self.pipeline.forward(inputs, self._logits)
            for device in self._gpus:
                torch.cuda.synchronize(device)
        except torch.OutOfMemoryError as error:
            raise StartupError(
                f"too little memory on the GPU for a step of {sum(steps[0])} tokens over {rows} rows; "
                "lower --max-running, --prefill-tokens-per-step or --gpu-memory-utilization"
            ) from error
        logger.info("warmed up in %.1f s, work space %s", time.perf_counter() - started, self.work_mib())

    def _give_up_graphs(self, error: CaptureError) -> None:
        logger.error("steps go on without graphs: %s", error)
        self._graphs = self._prefill_graphs = self._mixed_graphs = None
        self.graph_refusal = str(error)

    # Steps ---------------------------------------------------------------------------------------------------

    def sampler(self, name: str) -> Sampler:
        """The sampler of that name if `--samplers` has it ("" = its first), or the next; made at first use."""
        if name not in self._samplers:
            self._makes_sampler = True  # its kernels may have to be compiled
            try:
                self._samplers[name], refusals = choose_sampler(
                    order(self._config.samplers, asked=name),
                    self.device,
                    self.limits.num_seats,
                    self.vocab,
                    self.penalty_exempt_ids(),
                    made=self._samplers.values(),
                )
            finally:
                self._makes_sampler = False
            self.sampler_refusals |= refusals
        return self._samplers[name]

    @property
    def is_making_ready(self) -> bool:
        """Whether a sampler or a graph is being made, which may take longer than any step. Any thread."""
        return self._makes_sampler or (self._graphs is not None and self._graphs.is_recording)

    def penalty_exempt_ids(self) -> list[int]:
        """Ids that never add to the penalty count, those beyond this model's vocabulary left out."""
        return [i for i in self.tokenizer.penalty_exempt_ids if i < self.vocab]

    def parts(self, rows: list[ScheduledRow]) -> list[list[ScheduledRow]]:
        """A step's rows as they are launched: all together; with graphs, rows that decode after the others."""
        parts = [rows]
        if self._graphs is not None:
            reading, decoding = [row for row in rows if not row.feeds_back], [row for row in rows if row.feeds_back]
            parts = [reading, decoding]
            if reading and decoding and self._mixed_size(decoding, reading) is not None:
                parts = [decoding + reading]
        return [part for part in parts if part]

    @torch.inference_mode()
    def launch(self, rows: list[ScheduledRow], after: Collection[Launched] = ()) -> Launched:
        """Start one of `parts`: read the rows' tokens, draw for those that draw. Does not wait for the device.

        `after`: the oldest step that the host has not read, in which tokens of these rows may be drawn.
        """
        step = Launched(rows, [row for row in rows if row.draws])
        self._tokens.bring(max(self._known, *(part.tokens_sent for part in after), 0))
        if self._graphs is not None and rows[0].feeds_back:
            try:
                if rows[-1].feeds_back:
                    self._launch_graph(self._graphs, step)
                else:
                    self._launch_mixed(step)
                return step
            except CaptureError as error:
                self._give_up_graphs(error)
        self._draw_groups(step, self._forward(self._inputs(rows)))
        return step

    def _forward(self, inputs: StepInputs) -> Tensor:
        """Logits [R, V] of a step of any rows: by a graph if there is one that holds it."""
        size = None if self._prefill_graphs is None else self._prefill_graphs.size_for(inputs)
        if self._prefill_graphs is not None and size is not None:
            try:
                return self._prefill_graphs.run(inputs, size)
            except CaptureError as error:
                self._give_up_graphs(error)
        holds_all = self._logits is not None and len(inputs.logit_tokens) <= len(self._logits)
        return self.pipeline.forward(inputs, self._logits if holds_all else None)

    def _launch_graph(self, graphs: DecodeGraphs, step: Launched) -> None:
        """A step in which every row reads the token it drew last: a graph finds them on the device."""
        sequences = [row.sequence for row in step.rows]
        seats = [sequence.seat for sequence in sequences]
        slots = _slots_of(sequences)
        if self._draws_in_graph(sequences):
            drawn = graphs.run(seats, *slots)
            step.tokens_sent = self._tokens.send()
            step.draws.append(Drawn(list(range(len(seats))), HostCopy(drawn)))
        else:
            self._draw_groups(step, graphs.run_logits(seats, *slots))

    def _draws_in_graph(self, sequences: Iterable[Sequence]) -> bool:
        """Whether all of them draw as graphs do: by the first sampler, and without log-probabilities."""
        for sequence in sequences:
            if sequence.request.sampling.top_logprobs is not None:
                return False
            name = sequence.job.spec.sampler
            if name and self.sampler(name) is not self.sampler(""):
                return False
        return True

    def _mixed_size(self, decoding: list[ScheduledRow], reading: list[ScheduledRow]) -> MixedSize | None:
        """The graph that holds both, if they may go together."""
        if self._mixed_graphs is None:
            return None
        tokens = sum(row.num_tokens for row in reading)
        size = self._mixed_graphs.size_for(len(decoding), len(reading), tokens)
        drawing = (row.sequence for row in [*decoding, *reading] if row.draws)
        return size if size is not None and self._draws_in_graph(drawing) else None

    def _launch_mixed(self, step: Launched) -> None:
        """Rows that decode, first, and prompts behind them: one graph draws for both."""
        decoding, reading = [r for r in step.rows if r.feeds_back], [r for r in step.rows if not r.feeds_back]
        size = self._mixed_size(decoding, reading)
        assert self._mixed_graphs is not None and size is not None, "`parts` has found a size for them"
        self._admit(row.sequence for row in reading if row.draws)
        sequences = [row.sequence for row in decoding]
        reads, writes = _slots_of(sequences)
        rows = {"seats": [sequence.seat for sequence in sequences], "read_slots": reads, "write_slots": writes}
        seats = [row.sequence.seat for row in reading if row.draws]
        drawn = self._mixed_graphs.run(size, rows, self._inputs(reading), seats)
        step.tokens_sent = self._tokens.send()
        places = [*range(len(decoding)), *range(size.decoding, size.decoding + len(seats))]
        step.draws.append(Drawn(list(range(len(places))), HostCopy(drawn), places=places))

    def _admit(self, sequences: Iterable[Sequence]) -> None:
        """Tell their samplers of rows that draw for the first time."""
        for sequence in sequences:
            if len(sequence.token_ids) == sequence.prompt_end:
                self.sampler(sequence.sampler).admit(sequence.seat, sequence.request.sampling)

    def _inputs(self, rows: list[ScheduledRow]) -> StepInputs:
        """The rows' tokens, those not known to the host filled in on the device."""
        sequences = [row.sequence for row in rows]
        inputs = step_inputs(
            [
                row.sequence.token_ids[
                    row.sequence.num_computed_tokens : row.sequence.num_computed_tokens + row.num_tokens
                ]
                for row in rows
            ],
            [sequence.read_slot for sequence in sequences],
            [sequence.write_slot for sequence in sequences],
            [i for i, row in enumerate(rows) if row.draws],
        )
        ahead = [i for i, sequence in enumerate(sequences) if sequence.is_ahead]
        if ahead:
            inputs = inputs.to(self.pipeline.devices[0])
            fed = self._tokens.to_feed
            seats = on_device([sequences[i].seat for i in ahead], torch.int64, fed.device)
            at = inputs.cu_seqlens[on_device(ahead, torch.int64, inputs.cu_seqlens.device)]
            inputs.tokens[at] = fed[seats].to(inputs.tokens.device)
        return inputs

    def _draw_groups(self, step: Launched, logits: Tensor) -> None:
        """Draw for the rows of logits [R, V], those of each sampler together."""
        groups: dict[str, list[int]] = {}
        for i, row in enumerate(step.drawing):
            groups.setdefault(row.sequence.sampler, []).append(i)
        for name, members in groups.items():
            picked = logits if len(groups) == 1 else logits[on_device(members, torch.int64, logits.device)]
            sequences = [step.drawing[i].sequence for i in members]
            sampler, seats = self.sampler(name), [sequence.seat for sequence in sequences]
            self._admit(sequences)
            sampled = sampler.sample(picked, seats)
            step.tokens_sent = self._tokens.remember(seats, sampled.token_ids)
            told = sampled.logprobs
            rest = (told.chosen, told.top_ids, told.top) if told is not None else ()
            step.draws.append(Drawn(members, HostCopy(sampled.token_ids, *rest), with_logprobs=told is not None))

    def read(self, step: Launched) -> list[tuple[int, TokenLogprob | None]]:
        """Tokens of the rows that draw, in their order. Waits for the step to end."""
        drawn: list[tuple[int, TokenLogprob | None]] = [(0, None)] * len(step.drawing)
        self._known = max(self._known, step.tokens_sent)
        for part in step.draws:
            on_host, *told = part.copy.read()
            tokens = on_host.tolist()
            if part.places is not None:
                tokens = [tokens[place] for place in part.places]
            results: list[tuple[int, TokenLogprob | None]] = [(token, None) for token in tokens]
            if part.with_logprobs:
                results = self._with_logprobs([step.drawing[i] for i in part.members], tokens, Logprobs(*told))
            if len(results) == len(drawn):
                return results
            for i, entry in zip(part.members, results, strict=True):
                drawn[i] = entry
        return drawn

    def _with_logprobs(
        self, rows: list[ScheduledRow], tokens: list[int], logprobs: Logprobs
    ) -> list[tuple[int, TokenLogprob | None]]:
        table = self.tokenizer.byte_table
        chosen, ids, top = logprobs.chosen.tolist(), logprobs.top_ids.tolist(), logprobs.top.tolist()
        results: list[tuple[int, TokenLogprob | None]] = []
        for i, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            wanted = row.sequence.request.sampling.top_logprobs
            if wanted is None:
                results.append((token, None))
                continue
            rivals = [(table[j], value) for j, value in zip(ids[i][:wanted], top[i][:wanted], strict=True)]
            results.append((token, TokenLogprob(table[token], chosen[i], rivals)))
        return results

    def is_lost(self) -> bool:
        """Whether a device cannot be used any more after a failed step, so that the process has to be replaced.

        An error inside a kernel stays with the device and comes back at every call; others do not.
        """
        try:
            for device in self._gpus:
                torch.cuda.synchronize(device)
        except RuntimeError:
            return True
        return False

    @staticmethod
    def is_out_of_memory(error: Exception) -> bool:
        """Whether a step failed for want of memory, so that a later one may succeed."""
        return isinstance(error, torch.OutOfMemoryError | MemoryError)

    def work_mib(self) -> dict[str, int]:
        """Memory of each GPU that holds neither weights nor slots: graphs, samplers, tensors of steps; in MiB."""
        found = {}
        for device in self._gpus:
            slots = self.pipeline.slot_bytes_on(device) * self._num_slots
            found[str(device)] = (torch.cuda.memory_reserved(device) - self._weight_bytes[device] - slots) >> 20
        return found

    def _pipeline_status(self) -> dict[str, Any]:
        """How the layers lie, how many groups of rows are on their way, and how values go from device to device."""
        places = [] if self._graphs is None else self._graphs.places
        return {
            "layers": [len(stage.layers) for stage in self.pipeline.stages],
            "micro_batches": self.limits.groups,
            "steps_in_flight": self.steps_in_flight,
            "links": [place.link_kind for place in places if place.link_kind is not None],
        }

    def status(self) -> dict[str, Any]:
        """Figures for /status, plain data."""
        shape = self.weights.shape
        return {
            "model": self._config.model_name,
            "model_file": self.weights.path.name,
            "model_shape": {"layers": shape.layers, "width": shape.width, "heads": shape.heads, "vocab": shape.vocab},
            "parameters": self.weights.num_parameters,
            "fingerprint": self.weights.fingerprint,
            "devices": self.device_names(),
            "dtype": self.pipeline.stages[0].precision.weights_name,
            "weight_bytes": sum(stage.weight_bytes for stage in self.pipeline.stages),
            "wkv_state": str(self.pipeline.stages[0].precision.wkv_state).removeprefix("torch."),
            "kernels": {"used": self.pipeline.stages[0].ops.name, "refused": self.pipeline.kernel_refusals},
            "decode_graphs": self.graph_refusal or "used",
            "pipeline": self._pipeline_status(),
            "samplers": {
                "used": {name or "default": sampler.name for name, sampler in self._samplers.items()},
                "refused": self.sampler_refusals,
            },
            "max_running": self.limits.max_running,
            "free_slots": self.pool.num_free,
            "state_bytes": self.pipeline.slot_bytes,
            "work_mib": self.work_mib(),
            "pool": self.pool.stats(),
        }


def _slots_of(sequences: list[Sequence]) -> tuple[list[int], list[int]]:
    """Where rows that have read their prompts read and write their states."""
    if all(sequence.spare_slot == NO_SLOT and sequence.shared is None for sequence in sequences):
        slots = [sequence.slot for sequence in sequences]
        return slots, slots
    return [sequence.read_slot for sequence in sequences], [sequence.write_slot for sequence in sequences]
