"""Splits a step's rows into launches, by graphs, adapters and mixtures. Never waits for a device."""

from __future__ import annotations

from rwkv_batch.core.scheduler import ScheduledRow
from rwkv_batch.core.sequence import Sequence
from rwkv_batch.model.adapter_table import NO_ADAPTER
from rwkv_batch.runner.graphs.mixed import MixedSize
from rwkv_batch.runner.graphs.step import StepGraphs
from rwkv_batch.runner.mixtures import num_states
from rwkv_batch.runner.pipeline import Pipeline
from rwkv_batch.runner.step_sampling import StepSampler
from state_pool.origins import Adapters


class LaunchGroups:
    """Splits the rows of steps. Engine thread."""

    def __init__(self, graphs: StepGraphs, pipeline: Pipeline, sampling: StepSampler, adapters: Adapters) -> None:
        self._graphs = graphs
        self._pipeline = pipeline
        self._step_sampler = sampling
        self._adapters = adapters

    def split(self, rows: list[ScheduledRow], mixes: bool = True) -> list[list[ScheduledRow]]:
        """Split a step's rows into launches.

        Constrained rows come last, which keeps each group's logits contiguous. With graphs, prefill rows are launched
        before decode rows, or with them if `mixes` and a mixed graph fits. Rows whose constraint waits for earlier
        tokens leave their logits in the shared buffer, so their launch is the last. Rows with an adapter that no graph
        supports come first.
        """
        if rows and are_all_plain(rows):
            return [rows]
        routed = [row for row in rows if self.is_routed(row)]
        rows = [row for row in rows if not self.is_routed(row)] if routed else rows
        mixtures = self._separate_mixtures(rows)
        if mixtures:
            separate = {id(row) for row in mixtures}
            rows = [row for row in rows if id(row) not in separate]
        if self._graphs.decode is None:
            parts = [mixtures, sorted(rows, key=_is_constrained)]
        else:
            reading, decoding = split_prefill_decode(rows)
            scored = [row for row in reading if row.scored]  # graphs return logits only
            reading = [row for row in reading if not row.scored]
            if mixes and reading and decoding and self.mixed_size(decoding, reading) is not None:
                reading, decoding = [], decoding + reading
            parts = [reading, scored, *split_prefill_decode(mixtures), decoding]
        parts = [[row for row in routed if row.scored], [row for row in routed if not row.scored], *parts]
        return [part for part in parts if part]

    def is_routed(self, row: ScheduledRow) -> bool:
        """Return whether the row's adapter prevents the use of graphs."""
        adapter = row.sequence.adapter
        return self._graphs.decode is not None and adapter is not None and self._pipeline.is_routed(adapter.slot_index)

    def _separate_mixtures(self, rows: list[ScheduledRow]) -> list[ScheduledRow]:
        """Return the mixtures that need a launch of their own.

        Decoding ones do if their members exceed the rows of a graph.
        """
        mixtures = [row for row in rows if row.sequence.members]
        graphs = self._graphs.decode
        if not mixtures or graphs is None:
            return mixtures if any(row.scored for row in rows) else []
        if num_states(row for row in rows if row.uses_device_token) > graphs.max_rows:
            return mixtures
        return [row for row in mixtures if not row.uses_device_token]

    def mixed_size(self, decoding: list[ScheduledRow], reading: list[ScheduledRow]) -> MixedSize | None:
        """Return the graph that fits both kinds of rows, if they may share one."""
        if self._graphs.mixed is None or any(row.sequence.members for row in decoding):
            return None
        if self.adapters_of([row.sequence for row in (*decoding, *reading)]) is not None:
            return None
        tokens = sum(row.num_tokens for row in reading)
        size = self._graphs.mixed_size(len(decoding), len(reading), tokens)
        sampling = (row.sequence for row in [*decoding, *reading] if row.samples and row.sequence.matcher is None)
        return size if size is not None and self._step_sampler.fits_graphs(sampling) else None

    def adapters_of(self, sequences: list[Sequence]) -> list[int] | None:
        """Return each row's adapter number, 0 for none; None if no row has an adapter."""
        if not self._adapters.num_refs or all(sequence.adapter is None for sequence in sequences):
            return None
        return [NO_ADAPTER if one.adapter is None else one.adapter.slot_index for one in sequences]


def split_prefill_decode(rows: list[ScheduledRow]) -> tuple[list[ScheduledRow], list[ScheduledRow]]:
    """Split rows into those whose tokens the host knows and those whose token is on the device."""
    return [row for row in rows if not row.uses_device_token], [row for row in rows if row.uses_device_token]


def are_all_plain(rows: list[ScheduledRow]) -> bool:
    """Return whether every row is plain (`Sequence.is_plain`): it reads its last sampled token."""
    return False not in [row.is_plain for row in rows]  # a generator takes twice as long


def _is_constrained(row: ScheduledRow) -> bool:
    return row.sequence.matcher is not None
