"""What a step, the running set and the queue may hold."""

from __future__ import annotations

from dataclasses import dataclass

BATCH_PART = 4
"""Batch work keeps one part in so many of the places, of the steps in which prompts of interactive rows are read, and
of the prompt tokens of those steps, whatever else there is."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one engine; all counts."""

    max_running: int
    max_waiting_rows: int
    prefill_tokens_per_step: int
    prefill_chunk: int
    max_prefill_tokens_with_decode: int
    """prompt tokens of a step in which rows decode"""
    groups: int = 1
    """micro-batches that rows which decode are dealt into"""
    max_waiting_rows_per_client: int = 0
    """0: three quarters of `max_waiting_rows`"""
    mixed_rows: int = 0
    """rows that decode beside which prompts cost little, since both share a graph"""
    min_gathered_prefill_tokens: int = 0
    """prompt tokens of all groups from which on their step comes in every round, however many rows decode, not in every
    fifth one; 0: it always does"""
    max_batch_rows_with_interactive: int = 0
    """batch rows that decode in a step while interactive requests come; 0: all"""

    jump_forward_max_rows: int = 32
    """rows in the steps beside which text that is certain is read at once"""
    masks_block_step: bool = False
    """whether all rows of a step wait while masks are computed"""

    @property
    def rows_in_step(self) -> int:
        """Most rows that decode in one step: a group and what it may have beyond its share (`Scheduler._rebalance_groups`)."""
        share = -(-self.max_running // self.groups)
        return self.max_running if self.groups == 1 else min(self.max_running, share + max(1, share // 8))

    @property
    def rows_in_mixed_step(self) -> int:
        """Most rows that decode in one step with prompts beside them in the same graph."""
        return min(self.rows_in_step, self.mixed_rows)

    @property
    def waiting_rows_per_client(self) -> int:
        """Rows of one client that may wait."""
        return self.max_waiting_rows_per_client or max(1, self.max_waiting_rows * 3 // 4)

    @property
    def reserved_running_slots(self) -> int:
        """Places that rows leave free for interactive jobs that have none."""
        return min(max(1, self.max_running // 16), self.max_running - 1)

    @property
    def batch_running_slots(self) -> int:
        """Places that batch rows need not leave to interactive ones."""
        return min(max(1, self.max_running // BATCH_PART), self.max_running - 1)

    @property
    def max_held_shared_prefixes(self) -> int:
        """Prompts of one class that several rows wait to go on from: each holds a slot until all of them run.

        With the other class's, and half the slots for turns that wait, they must leave one to go on with.
        """
        return 2 * self.max_shared_prefills if self.max_running >= 8 else 1

    @property
    def max_shared_prefills(self) -> int:
        """Prompts of one class that are read for several rows at a time."""
        return max(1, self.max_running // 8)

    @property
    def max_paused(self) -> int:
        """Rows that may have given way at a time; each keeps its slot and its seat."""
        return max(1, self.max_running // 2)

    @property
    def num_req_slots(self) -> int:
        """Rows of the samplers' state: those that run and those that are paused."""
        return self.max_running + self.max_paused
