"""Limits of a step, the running set and the queue."""

from __future__ import annotations

from dataclasses import dataclass

BATCH_PART = 4
"""Batch work gets at least one part in BATCH_PART of the running slots and of prefill."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one engine. All are counts."""

    max_running: int
    max_waiting_rows: int
    prefill_tokens_per_step: int
    prefill_chunk: int
    max_prefill_tokens_with_decode: int
    """prompt tokens of a step in which rows decode"""
    groups: int = 1
    """micro-batches that decoding rows are split into"""
    max_waiting_rows_per_client: int = 0
    """0: three quarters of `max_waiting_rows`"""
    mixed_rows: int = 0
    """up to this many decoding rows, prefill shares their graph and costs little"""
    min_gathered_prefill_tokens: int = 0
    """from this many queued prompt tokens on, every round includes prefill; below it, every fifth one. 0: always"""
    max_batch_rows_with_interactive: int = 0
    """batch rows that decode in a step while interactive requests arrive; 0: all"""

    jump_forward_max_rows: int = 32
    """up to this many running rows, rows jump forward"""
    masks_block_step: bool = False
    """whether all rows of a step wait while masks are computed"""

    @property
    def rows_in_step(self) -> int:
        """Maximum decoding rows of a step: a group's share and an eighth (`Scheduler._rebalance_groups`)."""
        share = -(-self.max_running // self.groups)
        return self.max_running if self.groups == 1 else min(self.max_running, share + max(1, share // 8))

    @property
    def rows_in_mixed_step(self) -> int:
        """Maximum decoding rows of a step that shares its graph with prefill."""
        return min(self.rows_in_step, self.mixed_rows)

    @property
    def waiting_rows_per_client(self) -> int:
        return self.max_waiting_rows_per_client or max(1, self.max_waiting_rows * 3 // 4)

    @property
    def reserved_running_slots(self) -> int:
        """Running slots left free for interactive jobs without a running row."""
        return min(max(1, self.max_running // 16), self.max_running - 1)

    @property
    def batch_running_slots(self) -> int:
        """Running slots that interactive rows may not take from batch rows."""
        return min(max(1, self.max_running // BATCH_PART), self.max_running - 1)

    @property
    def max_held_shared_prefixes(self) -> int:
        """Maximum shared prompts of one class whose continuations wait. Each holds a slot until all of them run.

        Both classes together, and half the slots for waiting turns, must leave a slot free.
        """
        return 2 * self.max_shared_prefills if self.max_running >= 8 else 1

    @property
    def max_shared_prefills(self) -> int:
        """Maximum shared prompts of one class that are read at a time."""
        return max(1, self.max_running // 8)

    @property
    def max_paused(self) -> int:
        """Maximum paused rows. Each keeps its state slot and its request slot."""
        return max(1, self.max_running // 2)

    @property
    def num_req_slots(self) -> int:
        """Request slots: one per running and per paused row."""
        return self.max_running + self.max_paused
