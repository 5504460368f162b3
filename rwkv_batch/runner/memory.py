"""Computes how many rows, slots and prompt tokens fit into device memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

import torch
from torch import Tensor

from native import machine
from rwkv_batch.config import ALL_BATCH_ROWS, EngineConfig
from rwkv_batch.core.drafters import MAX_DRAFT_TOKENS
from rwkv_batch.core.shares import Limits
from rwkv_batch.errors import StartupError
from rwkv_batch.model.state import ModelShape
from rwkv_batch.model.step_inputs import step_inputs
from rwkv_batch.runner.graphs.mixed import max_decode_rows, min_gathered_prefill_tokens
from rwkv_batch.runner.pipeline import Pipeline
from state_pool.layout import DUMMY_SLOT, FIRST_FREE_SLOT, ZERO_SLOT

logger = logging.getLogger(__name__)

CPU_ROWS = 256
GPU_JUMP_FORWARD_ROWS = 32
"""With more rows on a GPU, jump-forward decoding is off.

A step of few rows takes as long as reading the weights, so one more token is free. A step of many rows gets slower
with each token. On a CPU, reading a token needs no logits, no mask and no sample, so there is no limit.
"""
GPU_ROWS = 1024
CPU_PREFILL_TOKENS = 256
GPU_PREFILL_TOKENS = 2048
"""The longest graph of prompts. On an H200 with 7.2B in int8, 4,096 tokens take 57 ms in one step and in two."""
GPU_PREFILL_WITH_DECODE = 1024
"""As fast per token as more. On an H200 with 7.2B (26 ms for 8 x 128), decoding rows wait 40 ms, not 110."""
CPU_BATCH_ROWS_PER_THREAD = 4
CPU_SLOTS_FRACTION = 0.25
"""of the machine's memory"""
CPU_SLOTS_FREE_FRACTION = 0.5
"""of the free memory, for an additional model"""
GPU_DRAFT_SLOTS, CPU_DRAFT_SLOTS = 128, 32
"""States of drafted tokens at once; an eighth of all slots at most. On a GPU for 16 tokens of each of 8 rows."""


class Memory:
    """Divides the memory that the weights leave on each device. Used before slots are allocated."""

    def __init__(self, config: EngineConfig, pipeline: Pipeline) -> None:
        self._config = config
        self._pipeline = pipeline
        self._slot_bytes = {device: pipeline.slot_bytes_on(device) for device in set(pipeline.devices)}

    def limits(self) -> Limits:
        """Return the engine's limits, as configured or by memory. Raises StartupError if no row fits."""
        on_gpu = self._pipeline.devices[-1].type == "cuda"
        groups = self._config.micro_batches or self._pipeline.concurrency
        rows = self._config.max_running or self._max_rows(GPU_ROWS * groups if on_gpu else CPU_ROWS)
        prefill_tokens = self._config.prefill_tokens_per_step or (GPU_PREFILL_TOKENS if on_gpu else CPU_PREFILL_TOKENS)
        with_decode = self._config.max_prefill_tokens_with_decode or (
            GPU_PREFILL_WITH_DECODE if on_gpu else prefill_tokens
        )
        return Limits(
            max_running=rows,
            max_waiting_rows=self._config.max_waiting_rows,
            max_waiting_rows_per_client=self._config.max_waiting_rows_per_client,
            prefill_tokens_per_step=prefill_tokens,
            prefill_chunk=self._config.prefill_chunk,
            max_prefill_tokens_with_decode=min(with_decode, prefill_tokens),
            groups=groups,
            max_batch_rows_with_interactive=self._max_batch_rows_with_interactive(on_gpu),
            mixed_rows=max_decode_rows(self._pipeline.concurrency) if on_gpu else 0,
            min_gathered_prefill_tokens=min_gathered_prefill_tokens(self._pipeline.concurrency) if on_gpu else 0,
            jump_forward_max_rows=GPU_JUMP_FORWARD_ROWS if on_gpu else rows,
            masks_block_step=not on_gpu,
        )

    def _max_batch_rows_with_interactive(self, on_gpu: bool) -> int:
        """Return the value for `Limits`. 0 means no limit."""
        configured = self._config.max_batch_rows_with_interactive
        if configured == ALL_BATCH_ROWS:
            return 0
        return configured or (0 if on_gpu else CPU_BATCH_ROWS_PER_THREAD * torch.get_num_threads())

    def _max_rows(self, max_rows: int) -> int:
        """Return the number of rows whose slots fit into the free memory."""
        device = min(self._slot_bytes, key=lambda device: self._free_bytes(device) // self._slot_bytes[device])
        free, share = self._free_bytes(device), self._slot_bytes[device]
        fitting = free // share - self._parked_slots() - self._draft_slots(max_rows, free // share)
        if fitting < 1:
            raise StartupError(
                f"Too little memory on {device}: {free >> 20} MiB are free for states of {share >> 20} MiB, and "
                f"{self._parked_slots()} slots are reserved; "
                "lower --l1-sessions and --prefix-cache-slots, or use a smaller model"
            )
        return min(max_rows, fitting * 8 // 9 or 1)

    def num_slots(self, rows: int, session_slots: int) -> tuple[int, int]:
        """Return the number of slots, and how many of them are for states of drafted tokens.

        The others are one per row, an eighth more for checkpoints, and those for cached states and sessions.

        session_slots: extra slots per row, limited to half of the free memory. Paused rows use them too.
        """
        slots = rows + max(4, rows // 8) + self._parked_slots()
        fitting = min(self._free_bytes(device) // share for device, share in self._slot_bytes.items())
        slots += int(min(rows * session_slots, max(0, fitting - slots) // 2))
        drafts = min(self._draft_slots(rows, fitting), max(0, fitting - slots))
        return slots + drafts, drafts

    def _draft_slots(self, rows: int, fitting: int) -> int:
        if self._config.speculate == "off":
            return 0
        most = GPU_DRAFT_SLOTS if self._pipeline.devices[-1].type == "cuda" else CPU_DRAFT_SLOTS
        return min(rows * MAX_DRAFT_TOKENS, most, fitting // 8)

    def _free_bytes(self, device: torch.device) -> int:
        if device.type != "cuda":
            share = int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * CPU_SLOTS_FRACTION)
            free = machine.free_memory() if self._config.loads_at_low_priority else None
            return share if free is None else min(share, int(free * CPU_SLOTS_FREE_FRACTION))
        free, total = torch.cuda.mem_get_info(device)
        return int(free - (1 - self._config.gpu_memory_utilization) * total)

    def _parked_slots(self) -> int:
        pool = self._config.pool
        tuned = min(len(self._config.states), pool.state_slots)
        return pool.l1_sessions + pool.prefix_cache_slots + tuned + FIRST_FREE_SLOT


def log_sizes(name: str, pipeline: Pipeline, shape: ModelShape, rows: int, slots: int) -> None:
    """Log what is served: the model and its type, then the devices with rows and slots."""
    weights = pipeline.stages[0].precision.weights_name
    logger.info("model %s: %s, weights in %s", name, shape.describe(), weights)
    devices = ", ".join(_describe_device(device) for device in dict.fromkeys(pipeline.devices))
    slots_text = f"{slots} slots of {pipeline.slot_bytes >> 10} KiB"
    logger.info("device %s: up to %d rows at once, %s", devices, rows, slots_text)


def _describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{device} ({properties.name}, {properties.total_memory >> 30} GiB)"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{device} ({torch.get_num_threads()} threads, {memory >> 30} GiB)"


def allocate_slots(pipeline: Pipeline, num_slots: int) -> None:
    """Allocate the slots of all stages. Raises StartupError if the slots do not fit."""
    try:
        pipeline.allocate_slots(num_slots)
    except (RuntimeError, MemoryError) as error:
        raise StartupError(
            f"Out of memory: {num_slots} slots of {pipeline.slot_bytes >> 10} KiB do not fit ({error}). "
            "Lower --max-running."
        ) from error


def reserve_work_memory(pipeline: Pipeline, limits: Limits) -> None:
    """Allocate the calling thread's memory for the largest step. Raises StartupError if it does not fit."""
    try:
        pipeline.reserve(limits.prefill_tokens_per_step + limits.rows_in_step)
    except MemoryError as error:
        raise StartupError(
            f"Out of memory: {error}. Lower --max-running (now {limits.max_running}) or --prefill-tokens-per-step "
            f"(now {limits.prefill_tokens_per_step})."
        ) from error


def work_mib(pipeline: Pipeline, num_slots: int, weight_bytes: Mapping[torch.device, int]) -> dict[str, int]:
    """Return each GPU's memory in MiB without weights and slots: graphs, samplers, activations."""
    work = {}
    for device, weights in weight_bytes.items():
        slots = pipeline.slot_bytes_on(device) * num_slots
        work[str(device)] = (torch.cuda.memory_reserved(device) - weights - slots) >> 20
    return work


def run_all_prompt_sizes(pipeline: Pipeline, limits: Limits, logits: Tensor | None, decode_tokens: int) -> None:
    """Run a step of every size. Raises StartupError if one does not fit.

    Steps read the zero state and write the dummy slot. The longest step with the most logits comes first, so later
    steps fit into its memory.

    logits [rows, V]: receives the logits, or None; decode_tokens: of each row in the same step.
    """
    longest, chunk, rows = limits.prefill_tokens_per_step, limits.prefill_chunk, limits.rows_in_step
    sizes = [2**i for i in reversed(range(longest.bit_length()))]
    steps = [[max(1, longest // rows) + decode_tokens] * rows]
    steps += [[min(chunk, size - start) for start in range(0, size, chunk)] for size in sizes]
    try:
        for lengths in steps:
            prompts, count = [[0] * length for length in lengths], len(lengths)
            sampling_rows = list(range(min(count, rows)))
            inputs = step_inputs(prompts, [ZERO_SLOT] * count, [DUMMY_SLOT] * count, sampling_rows)
            pipeline.forward(inputs, logits)
        for device in dict.fromkeys(pipeline.devices):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    except torch.OutOfMemoryError as error:
        raise StartupError(
            f"Out of GPU memory: a step of {sum(steps[0])} tokens in {rows} rows does not fit. Lower --max-running "
            f"(now {limits.max_running}), --prefill-tokens-per-step (now {longest}) or --gpu-memory-utilization."
        ) from error
