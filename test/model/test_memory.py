"""Slots by memory: those of an additional model use part of the free memory."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from native import machine
from rwkv_batch.config import ALL_BATCH_ROWS, EngineConfig
from rwkv_batch.errors import StartupError
from rwkv_batch.runner.graphs.decode import padded_sizes
from rwkv_batch.runner.graphs.mixed import usable_mixed_sizes
from rwkv_batch.runner.memory import CPU_SLOTS_FREE_FRACTION, Memory

SLOT = 1 << 20
PIPELINE: Any = SimpleNamespace(devices=[torch.device("cpu")], concurrency=1, slot_bytes_on=lambda _device: SLOT)


def rows(free: int | None, loads_at_low_priority: bool, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1 << 20}[name])
    monkeypatch.setattr(machine, "free_memory", lambda: free)
    return (
        Memory(EngineConfig(model_path="", loads_at_low_priority=loads_at_low_priority), PIPELINE).limits().max_running
    )


def test_an_additional_model_uses_part_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rows(100 * SLOT, False, monkeypatch) == rows(None, True, monkeypatch) == 256
    few = rows(300 * SLOT, True, monkeypatch)
    assert 0 < few < 300 * CPU_SLOTS_FREE_FRACTION
    with pytest.raises(StartupError, match="Too little memory"):
        rows(10 * SLOT, True, monkeypatch)


def test_free_memory_is_the_smallest_limit(tmp_path: Path) -> None:
    meminfo, group = tmp_path / "meminfo", tmp_path / "group"
    assert machine.free_memory(str(meminfo), str(group)) is None
    meminfo.write_text("MemTotal:  8000 kB\nMemAvailable:  5000 kB\n")
    group.mkdir()
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("1000\n")
    assert machine.free_memory(str(meminfo), str(group)) == 5000 << 10
    (group / "memory.max").write_text("3000\n")
    assert machine.free_memory(str(meminfo), str(group)) == 2000


@pytest.mark.parametrize(
    ("folder", "limit", "used", "prefix"),
    [(".", "memory.max", "memory.current", ""), ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")],
)
def test_a_cgroups_file_cache_is_free(tmp_path: Path, folder: str, limit: str, used: str, prefix: str) -> None:
    group = tmp_path / folder
    group.mkdir(exist_ok=True)
    (group / limit).write_text("10000\n")
    (group / used).write_text("9900\n")
    assert machine.free_memory("", str(tmp_path)) == 100, "without figures all counts as used"
    figures = {"anon": 1500, "file": 8400, "shmem": 400, "inactive_file": 5000, "active_file": 3000}
    (group / "memory.stat").write_text("".join(f"{prefix}{name} {value}\n" for name, value in figures.items()))
    assert machine.free_memory("", str(tmp_path)) == 8100, "shared memory stays used"
    (group / used).write_text("7000\n")  # read after some pages were freed
    assert machine.free_memory("", str(tmp_path)) == 10000


def test_a_machine_without_memory_figures(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  8000 kB\n\nMemFree:  10 kB\n")
    assert machine.free_memory(str(tmp_path / "meminfo"), str(tmp_path)) is None


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("given", "limit"), [(0, 8), (ALL_BATCH_ROWS, 0), (7, 7)])
def test_batch_rows_with_interactive_requests(given: int, limit: int) -> None:
    """The default is four per compute thread."""
    memory = Memory(EngineConfig(model_path="", max_running=8, max_batch_rows_with_interactive=given), PIPELINE)
    assert memory.limits().max_batch_rows_with_interactive == limit


@pytest.mark.parametrize(
    ("gpus", "max_running", "maximum"), [(1, 2048, 256), (2, 2048, 512), (2, 2, 8), (4, 4096, 64), (2, 100, 64)]
)
def test_the_largest_number_of_decode_rows_in_mixed_steps(gpus: int, max_running: int, maximum: int) -> None:
    """By the number of stages that work at the same time. No graph is larger than a group can be."""
    devices = [torch.device("cuda", i) for i in range(gpus)]
    pipeline: Any = SimpleNamespace(devices=devices, concurrency=gpus, slot_bytes_on=lambda _device: SLOT)
    limits = Memory(EngineConfig(model_path="", max_running=max_running), pipeline).limits()
    assert limits.mixed_rows == {1: 256, 2: 512, 4: 64}[gpus], "with so many rows prompts are scheduled"
    assert (limits.min_gathered_prefill_tokens > 0) == (gpus == 4), "one step of prompts in three rounds is enough"
    sizes = usable_mixed_sizes(limits.rows_in_mixed_step)
    assert max(size.decoding for size in sizes) == maximum


@pytest.mark.parametrize("maximum", [8, 300, 512, 960])
def test_no_step_of_up_to_512_rows_is_padded_by_a_whole_tile(maximum: int) -> None:
    sizes = padded_sizes(maximum)
    assert sizes[-1] >= maximum
    for rows in range(1, min(maximum, 512) + 1):
        assert next(size for size in sizes if size >= rows) - rows < 16


def test_stages_on_one_gpu_count_as_one() -> None:
    gpu = torch.device("cuda", 0)
    pipeline: Any = SimpleNamespace(devices=[gpu, gpu], concurrency=1, slot_bytes_on=lambda _device: SLOT)
    assert Memory(EngineConfig(model_path="", max_running=600), pipeline).limits().mixed_rows == 256


@pytest.mark.parametrize(
    ("free", "mode", "rows", "drafts"),
    [(9999, "off", 40, 0), (9999, "auto", 40, 128), (9999, "auto", 2, 32), (400, "auto", 40, 50), (60, "auto", 40, 0)],
)
def test_states_of_drafts_take_what_others_leave(
    monkeypatch: pytest.MonkeyPatch, free: int, mode: str, rows: int, drafts: int
) -> None:
    """A service that fits without drafts fits with them."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free * SLOT, free * SLOT))
    gpu = torch.device("cuda", 0)
    pipeline: Any = SimpleNamespace(devices=[gpu], concurrency=1, slot_bytes_on=lambda _device: SLOT)
    config = EngineConfig(model_path="", max_running=rows, speculate=mode, gpu_memory_utilization=1.0)
    total, kept = Memory(config, pipeline).num_slots(rows, 0)
    off, none = Memory(msgspec.structs.replace(config, speculate="off"), pipeline).num_slots(rows, 0)
    assert (total - off, kept, none) == (drafts, drafts, 0)


def test_rows_leave_memory_for_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (400 * SLOT, 400 * SLOT))
    gpu = torch.device("cuda", 0)
    pipeline: Any = SimpleNamespace(devices=[gpu], concurrency=1, slot_bytes_on=lambda _device: SLOT)
    memory = Memory(EngineConfig(model_path="", speculate="auto", gpu_memory_utilization=1.0), pipeline)
    total, drafts = memory.num_slots(memory.limits().max_running, 0)
    assert total <= 400 and drafts > 40
