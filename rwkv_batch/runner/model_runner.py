"""The model with everything that a step needs: slots, samplers, graphs, the state pool. Engine thread only."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from rwkv_batch.config import EngineConfig
from rwkv_batch.core.scheduler import ScheduledRow
from rwkv_batch.core.sequence import Sequence
from rwkv_batch.errors import StartupError
from rwkv_batch.model.step_inputs import StepInputs
from rwkv_batch.runner.draft_sampling import DraftSampler
from rwkv_batch.runner.draft_steps import DraftSteps
from rwkv_batch.runner.graphs.capture import CaptureError
from rwkv_batch.runner.graphs.decode import DecodeGraphs
from rwkv_batch.runner.graphs.step import LaunchGroups, StepGraphs, are_all_plain, split_prefill_decode
from rwkv_batch.runner.links import LastTokens, TokenCopies
from rwkv_batch.runner.low_priority import run_at_low_priority, set_compute_threads, threads_per_replica
from rwkv_batch.runner.memory import (
    Memory,
    allocate_slots,
    log_sizes,
    reserve_work_memory,
    run_all_prompt_sizes,
    work_mib,
)
from rwkv_batch.runner.model_files import load_pipeline
from rwkv_batch.runner.prompt_logprobs import PromptScorer, RowScores
from rwkv_batch.runner.row_inputs import RowInputs, device_slots, mix_logits, slots_of, split_drafts
from rwkv_batch.runner.state_copy import PipelineArena
from rwkv_batch.runner.step_sampling import (
    DeferredSample,
    InFlightStep,
    InFlightTokens,
    SampledToken,
    StepSampler,
    split_by_constraint,
)
from rwkv_batch.tokenizer import Tokenizer, make_byte_tables
from sampling.grammar.constraint import GrammarError
from sampling.registry import COMPILED_ON_FIRST_USE
from state_pool.errors import DatabaseUnusable
from state_pool.pool import StatePool

logger = logging.getLogger(__name__)


class ModelRunner:
    """Loads the model and runs its steps. Engine thread.

    The constructor raises StartupError: one line with the reason and the remedy.
    """

    def __init__(self, config: EngineConfig, wake: Callable[[], None]) -> None:
        """wake: called from the pool's threads when the engine's thread must poll the pool."""
        self._config = config
        if threads := config.threads or threads_per_replica(config.replicas):
            set_compute_threads(threads)
        self.tokenizer = Tokenizer()
        make_byte_tables()
        load = partial(load_pipeline, config)
        low_priority = partial(run_at_low_priority, only_idle_cores=config.only_idle_cores)
        self.weights, self.pipeline = low_priority(load) if config.loads_at_low_priority else load()
        self.vocab = self.weights.shape.vocab
        self.device = self.pipeline.devices[-1]
        self._gpus = [device for device in dict.fromkeys(self.pipeline.devices) if device.type == "cuda"]
        if len(self._gpus) > 1:
            # A copy from a default stream to another device waits for all work of both, and all later work waits for
            # it.
            for device in self._gpus:
                torch.cuda.set_stream(torch.cuda.Stream(device))
        if self._gpus:
            torch.cuda.set_device(self.device if self.device.type == "cuda" else self._gpus[-1])
            torch.cuda.empty_cache()  # left over from loading
        self._weight_bytes = {device: torch.cuda.memory_allocated(device) for device in self._gpus}
        self.draft_model = DraftSteps.load(config, self.device)
        memory = Memory(config, self.pipeline)
        self.limits = memory.limits()
        self.overlaps = config.overlap and (self.device.type == "cuda" or config.overlap_on_cpu)
        # A spare slot keeps the state before a session's turn. With overlap, another one that before the last token.
        self._num_slots, self.num_draft_slots = memory.num_slots(
            self.limits.max_running, session_slots=2 if self.overlaps else 1
        )
        # A GPU's memory must be allocated on the thread with its streams.
        yields_cores = config.loads_at_low_priority and not self._gpus
        allocate = partial(allocate_slots, self.pipeline, self._num_slots)
        low_priority(allocate) if yields_cores else allocate()
        try:
            self.arena = PipelineArena(self.pipeline)
            self.pool = StatePool(self.arena, config.pool_of_model, wake)
        except DatabaseUnusable as error:
            raise StartupError(str(error)) from error
        self.steps_in_flight = self.limits.groups + self.overlaps
        """launched but not yet read by the host: one per group, and one more if it hides the host's work"""
        self.step_sampler = StepSampler(
            config.samplers, self.device, self.limits.num_req_slots, self.vocab, self.tokenizer
        )
        if yields_cores:
            low_priority(partial(self.step_sampler.sampler, ""))
        self._scorer = PromptScorer(self.pipeline.stages[-1], self.tokenizer)
        sampler, parameters = self.step_sampler.sampler(""), self.weights.num_parameters
        self.graphs = StepGraphs.for_stages(
            self.pipeline.stages, sampler, self.limits, config, self.steps_in_flight, parameters
        )
        self._inputs = RowInputs(self.pool.adapters, self.pipeline.devices[0])
        self._launch_groups = LaunchGroups(self.graphs, self.pipeline, self.step_sampler, self._inputs)
        self._require_pieces()
        self._tokens = self._make_last_tokens()
        self._last_received = 0
        """number of the `send` of the last step that the host has read"""
        self._logits = self._make_logits()
        """[rows, V]: the logits of steps; None: each step allocates its own"""
        if config.warmup:
            self._warm_up()
        log_sizes(config.model_name, self.pipeline, self.weights.shape, self.limits.max_running, self._num_slots)

    def _make_logits(self) -> Tensor | None:
        """Allocate the logits of a CPU's steps.

        Each step's logits are used up before the next step. Memory of this size that is freed after every step would be
        mapped again page by page, while all compute threads wait.
        """
        if self.device.type != "cpu" or self.steps_in_flight > 1:
            return None if self.graphs.decode is None else self.graphs.decode.logits
        return torch.empty(self.limits.rows_in_step, self.vocab)

    def device_names(self) -> list[str]:
        return [str(device) for device in self.pipeline.devices]

    @cached_property
    def _copies(self) -> TokenCopies:
        """Copies of tokens that graphs sample."""
        return TokenCopies(self.device, max(self.limits.rows_in_step, self.graphs.max_sampled_with_prompts, 1))

    @cached_property
    def drafts(self) -> DraftSampler:
        return DraftSampler(self.step_sampler, self._tokens, self.device, self.graphs.decode is not None)

    def _make_last_tokens(self) -> LastTokens:
        if self.graphs.decode is not None:
            return self.graphs.decode.tokens
        first, last = self.pipeline.devices[0], self.device
        if first.type != last.type:  # the host copies the tokens
            first = last
        return LastTokens(self.limits.num_req_slots, first, last, self.steps_in_flight, self.steps_in_flight > 1)

    def _require_pieces(self) -> None:
        """Check that steps can be launched in pieces.

        Raises StartupError if batch_step_layers is set but they cannot.
        """
        layers = self._config.batch_step_layers
        if layers > 0 and not self.has_pieces:
            reason = self.graphs.refusal or f"the layers are on {self.device_names()} or streamed from host memory"
            needs = "needs decode graphs and one GPU that keeps all layers"
            raise StartupError(f"batch_step_layers {layers} {needs}: {reason}; leave it out")

    def _warm_up(self) -> None:
        """Prepare for every kind of step. So no request waits for a capture, a compile or an allocation."""
        reserve_work_memory(self.pipeline, self.limits)
        if self.device.type != "cuda":
            return
        started = time.perf_counter()
        for name in COMPILED_ON_FIRST_USE:
            self.step_sampler.sampler(name)
        self.graphs.warm_up(adapters=bool(self._config.served_adapters))
        decode_tokens = 0 if self.graphs.decode is not None else 1  # one token per decode row
        run_all_prompt_sizes(self.pipeline, self.limits, self._logits, decode_tokens)
        logger.info(
            "warm-up took %.1f s; MiB besides weights and slots: %s", time.perf_counter() - started, self.work_mib()
        )

    # Steps ---------------------------------------------------------------------------------------------------

    @property
    def is_compiling_or_capturing(self) -> bool:
        """Whether a sampler or a graph is being created. That may take longer than a step. Any thread."""
        return self.step_sampler.is_compiling or self.graphs.is_recording

    @property
    def has_pieces(self) -> bool:
        """Whether steps with decode rows can be launched in pieces."""
        return self.graphs.has_pieces

    def split(self, rows: list[ScheduledRow], mixes: bool = True) -> list[list[ScheduledRow]]:
        """Split rows into launches; see `LaunchGroups.split`."""
        return self._launch_groups.split(rows, mixes)

    @torch.inference_mode()
    def launch(
        self,
        rows: list[ScheduledRow],
        started: dict[Sequence, None],
        after: Collection[InFlightStep] = (),
        between: Callable[[], None] | None = None,
    ) -> InFlightStep:
        """Launch one of `split`: read the rows' tokens and sample. Does not wait for the device.

        started: see `Admission`; the rows are removed from it
        after: launched steps that the host has not read and that may have sampled these rows' tokens.
        between: called between the pieces of the step, if it has any. It may launch prefill steps. Most of such a
        step is done on return.
        """
        are_plain = are_all_plain(rows)
        step = InFlightStep(rows, rows if are_plain else [row for row in rows if row.samples_token])
        self._tokens.receive(max(self._last_received, *(part.tokens_sent for part in after), 0))
        is_routed = not are_plain and self._launch_groups.is_routed(rows[0])
        graphs = None if is_routed else self.graphs.for_decode(rows, are_plain)
        if graphs is not None:
            self.step_sampler.admit(rows, started)
            self.drafts.count_ahead()
            try:
                if are_plain:
                    self._launch_plain(graphs, step, between)
                elif rows[-1].uses_device_token:
                    self._launch_graph(graphs, step, between)
                else:
                    self._launch_mixed(graphs, step)
                return step
            except CaptureError as error:
                self.graphs.disable(error)
        inputs, x = self._inputs.build(rows, self._tokens), None
        if any(row.scored for row in rows):
            x, inputs = self._run_layers(inputs, between)
            logits = self.pipeline.stages[-1].logits(x, inputs)
        else:
            logits = self._forward(inputs, None if is_routed else self._logits, between)
        step.host_s = time.monotonic() - self.drafts.read_at
        logits, step.draft_logits = split_drafts(logits, step.sampling_rows)
        self.step_sampler.admit(rows, started)  # behind the layers, which the device runs meanwhile
        self.drafts.count_ahead(step.sampling_rows)
        self.step_sampler.sample(step, mix_logits(logits, step.sampling_rows), self._tokens)
        if x is not None:  # the head runs on scored prompt tokens separately
            step.scored = self._scorer.launch(x, rows)
        self.drafts.sample_ahead(step, self.draft_model if self.limits.groups == 1 else None)
        step.layers_s = self.pipeline.layers_s
        return step

    def _run_layers(self, inputs: StepInputs, between: Callable[[], None] | None) -> tuple[Tensor, StepInputs]:
        """Run `Pipeline.run_layers`, in pieces if `between` is given and pieces exist."""
        return self.graphs.run_layers_in_pieces(inputs, between) or self.pipeline.run_layers(inputs)

    def _forward(self, inputs: StepInputs, into: Tensor | None, between: Callable[[], None] | None) -> Tensor:
        """Return the logits [R, V] of any step, in `into` if they fit. None: no graph may run it."""
        logits = None if into is None else self.graphs.logits_of_prompts(inputs, between)
        if logits is not None:
            return logits
        holds_all = into is not None and len(inputs.logit_tokens) <= len(into)
        out = into if holds_all else None
        if between is None or not self.has_pieces:
            return self.pipeline.forward(inputs, out)
        x, inputs_on_device = self._run_layers(inputs, between)
        return self.pipeline.stages[-1].logits(x, inputs_on_device, out)

    def _launch_plain(self, graphs: DecodeGraphs, step: InFlightStep, between: Callable[[], None] | None) -> None:
        """Launch a step of plain rows, the most common kind, without the checks of `_launch_graph`."""
        slots = [row.lowest_slot for row in step.rows]
        sampled_tokens = graphs.run([row.sequence.req_slot for row in step.rows], slots, slots, between=between)
        step.tokens_sent = self._tokens.send()
        step.samples.append(InFlightTokens(range(len(step.rows)), self._copies.start(sampled_tokens)))

    def _launch_graph(self, graphs: DecodeGraphs, step: InFlightStep, between: Callable[[], None] | None) -> None:
        """Launch a step of decode rows. A graph reads their last tokens on the device."""
        sequences = [row.sequence for row in step.rows]
        if any(sequence.members for sequence in sequences):
            self._launch_mixtures(graphs, step, sequences)
            return
        req_slots = [sequence.req_slot for sequence in sequences]
        slots, adapters = slots_of(sequences), self._inputs.adapters_of(sequences)
        unconstrained, constrained = split_by_constraint(step.sampling_rows)
        if unconstrained and self.step_sampler.fits_graphs([sequences[i] for i in unconstrained]):
            sampled_tokens = graphs.run(req_slots, *slots, constrained, adapters, between)
            step.tokens_sent = self._tokens.send()
            row_indices = unconstrained if constrained else None
            step.samples.append(
                InFlightTokens(unconstrained, self._copies.start(sampled_tokens), row_indices=row_indices)
            )
            if constrained:
                step.deferred = DeferredSample(constrained, graphs.logits, constrained)
        else:
            self.step_sampler.sample(step, graphs.run_logits(req_slots, *slots, adapters, between), self._tokens)

    def _launch_mixtures(self, graphs: DecodeGraphs, step: InFlightStep, sequences: list[Sequence]) -> None:
        """Launch a decode step with mixtures. Members are rows of the graph; their logits are mixed after it."""
        req_slots = [sequence.req_slot for sequence in sequences for _ in range(1 + len(sequence.members))]
        slots = [pair for sequence in sequences for pair in device_slots(sequence)]
        reads, writes = [read for read, _ in slots], [write for _, write in slots]
        adapters = self._inputs.adapters_of(
            [sequence for sequence in sequences for _ in range(1 + len(sequence.members))]
        )
        logits = mix_logits(graphs.run_logits(req_slots, reads, writes, adapters), step.sampling_rows)
        self.step_sampler.sample(step, logits, self._tokens)

    def _launch_mixed(self, graphs: DecodeGraphs, step: InFlightStep) -> None:
        """Launch decode rows, then prompts, in one graph that samples for both."""
        reading, decoding = split_prefill_decode(step.rows)
        size = self._launch_groups.mixed_size(decoding, reading)
        assert self.graphs.mixed is not None and size is not None, "`split` has found a size for them"
        sequences = [row.sequence for row in decoding]
        reads, writes = slots_of(sequences)
        rows = {"req_slots": [sequence.req_slot for sequence in sequences], "read_slots": reads, "write_slots": writes}
        req_slots = [row.sequence.req_slot for row in reading if row.samples_token]
        row_indices = [*range(len(decoding)), *range(size.decoding, size.decoding + len(req_slots))]
        unconstrained, constrained = split_by_constraint(step.sampling_rows)
        constrained_indices = [row_indices[i] for i in constrained]
        sampled_tokens = self.graphs.mixed.run(
            size, rows, self._inputs.build(reading, self._tokens), req_slots, constrained_indices
        )
        step.tokens_sent = self._tokens.send()
        step.samples.append(
            InFlightTokens(
                unconstrained, self._copies.start(sampled_tokens), row_indices=[row_indices[i] for i in unconstrained]
            )
        )
        if constrained:
            step.deferred = DeferredSample(constrained, graphs.logits, constrained_indices)

    @torch.inference_mode()
    def sample_constrained(self, step: InFlightStep) -> list[tuple[Sequence, GrammarError]]:
        """Sample the constrained rows if the host knows their earlier tokens; else do nothing.

        Returns the rows whose grammar cannot be matched any further, with the errors.
        """
        return self.step_sampler.sample_constrained(step, self._tokens)

    def read(self, step: InFlightStep) -> list[SampledToken]:
        """Return the tokens of the sampling rows, in order. Waits for the step."""
        self._last_received = max(self._last_received, step.tokens_sent)
        return self.step_sampler.read(step)

    def read_scores(self, step: InFlightStep) -> list[RowScores]:
        """Return the log-probabilities of the step's prompt tokens, by row. Waits for the step."""
        return [] if step.scored is None else self._scorer.read(step.scored)

    def is_device_lost(self) -> bool:
        """Return whether a device is unusable after a failed step.

        If so, the process must be replaced. Errors inside a kernel persist and return at every later call. Others do
        not.
        """
        try:
            for device in self._gpus:
                torch.cuda.synchronize(device)
        except RuntimeError:
            return True
        return False

    @staticmethod
    def is_out_of_memory(error: Exception) -> bool:
        """Return whether a step failed for lack of memory. If so, a later one may succeed."""
        return isinstance(error, torch.OutOfMemoryError | MemoryError)

    def work_mib(self) -> dict[str, int]:
        """See the function of `memory.py`."""
        return work_mib(self.pipeline, self._num_slots, self._weight_bytes)

    def _pipeline_status(self) -> dict[str, Any]:
        """Return the layer split, steps in flight and transports between devices."""
        links = [graph_stage.link_kind for graph_stage in self.graphs.graph_stages]
        return {
            "layers": [stage.share for stage in self.pipeline.stages],
            "streamed_layers": [stage.num_streamed for stage in self.pipeline.stages],
            "micro_batches": self.limits.groups,
            "steps_in_flight": self.steps_in_flight,
            "links": [kind for kind in (*links, self._tokens.link_kind) if kind],
        }

    def status(self) -> dict[str, Any]:
        """Return the figures of /status as plain data."""
        shape = self.weights.shape
        return {
            "model": self._config.model_name,
            "model_file": self.weights.path.name,
            "model_version": shape.version,
            "model_shape": {"layers": shape.layers, "width": shape.width, "heads": shape.heads, "vocab": shape.vocab},
            "parameters": self.weights.num_parameters,
            "fingerprint": self.weights.fingerprint,
            "adapters": list(self._config.adapters),
            "devices": self.device_names(),
            "dtype": self.pipeline.stages[0].precision.weights_name,
            "weight_bytes": sum(stage.weight_bytes for stage in self.pipeline.stages),
            "wkv_state": self.pipeline.stages[0].precision.wkv_state.display_name,
            "kernels": {"used": self.pipeline.stages[0].ops.name, "refused": self.pipeline.kernel_refusals},
            "decode_graphs": self.graphs.refusal or "used",
            "pipeline": self._pipeline_status(),
            "samplers": {"used": self.step_sampler.used, "refused": self.step_sampler.refusals},
            "max_running": self.limits.max_running,
            "free_slots": self.pool.tiers.slots.num_free,
            "state_bytes": self.pipeline.slot_bytes,
            "work_mib": self.work_mib(),
            "pool": self.pool.stats(),
        }
