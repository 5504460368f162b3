"""Mutants of the state pool's tiers in memory."""

from __future__ import annotations

from bench.mutants.mutant import Mutant, of
from bench.mutants.pool_tests import (
    BETWEEN,
    EFFECTS,
    FAILING_DISK,
    FAULTS,
    FIRST_WORLDS,
    MODEL,
    PREFIX,
    SESSIONS,
    SINGLE_WORLDS,
    WORLDS,
)

MUTANTS: list[Mutant] = [
    *of(
        "state_pool/cache/tiers.py",
        (SESSIONS, EFFECTS, PREFIX, SINGLE_WORLDS, FIRST_WORLDS, *FAULTS, MODEL, WORLDS),
        [
            (
                "return len(self._pins) < max(1, self.slots.num_usable // 2)",
                "return len(self._pins) < self.slots.num_usable",
                "turns that wait hold all slots: nobody goes on",
                "test/state_pool/test_pool_sessions.py::test_pressure_never_deadlocks",
            ),
            (
                "        self._pins[slot] -= 1\n        if self._pins[slot] == 0:\n            del self._pins[slot]\n",
                "        self._pins[slot] -= 1\n",
                "slots that were once read count as read for ever",
            ),
            (
                "session.pending is not None or self.slots.holders(session.slot) > 1:",
                "session.pending is not None:",
                "a state leaves its slot while a turn reads it",
            ),
            (
                "if other is not None and (not unwanted or used <= unwanted[0].updated):",
                "if other is not None:",
                "cached prefixes leave before sessions unused for longer",
                f"{BETWEEN}::test_the_longest_unused_state_makes_room_whoever_owns_it[True]",
            ),
            (
                "if session.slot != slot or not self._may_leave(session):\n                return\n            self.slots.drop(slot)",
                "self.slots.drop(slot)",
                "a session that was resumed while it moved loses its slot",
            ),
            (
                "        replay = session.replay\n        self.park(session, slot)\n        session.replay = replay\n",
                "        self.park(session, slot)\n",
                "turns logged after a checkpoint are lost when the state comes back to a slot",
                "test/state_pool/test_pool_sessions.py::test_pressure_never_deadlocks[lazy]",
            ),
            (
                "        self.slots.hold(slot)\n        self._leaving += leaves\n",
                "        self._leaving += leaves\n",
                "a slot is written while it is copied out",
            ),
            (
                "for session in list(index.l1) if excess > 0 else ():",
                "for session in reversed(list(index.l1)) if excess > 0 else ():",
                "the session used last leaves its slot first",
                "test/state_pool/test_pool_effects.py::test_the_longest_unused_session_leaves_first",
            ),
            (
                "if excess > 0 and not session.busy:  # those",
                "if excess > 0:  # those",
                "a state leaves host memory under the turn that waits for it",
                "test/state_pool/test_pool_effects.py::test_a_state_that_a_turn_waits_for_stays_in_host_memory",
            ),
            ("        session.replay = loaded.replay\n", "", "the log behind a stored state is not replayed"),
        ],
        ci=(8,),
    ),
    *of(
        "state_pool/cache/checkpoints.py",
        (SESSIONS, EFFECTS, SINGLE_WORLDS, FIRST_WORLDS, *FAULTS, MODEL, WORLDS),
        [
            (
                "            if not session.deleted:\n                self._store_state",
                "            if True:\n                self._store_state",
                "a deleted session's state is stored again",
                f"{BETWEEN}::test_a_state_that_leaves_its_slot_when_its_session_is_deleted_is_not_stored[log]",
            ),
            (
                "            if error is None:\n                mark_stored(session, job.session)",
                "            if True:\n                mark_stored(session, job.session)",
                "a state that was not stored counts as stored: it is forgotten",
                f"{FAILING_DISK}::test_full_tiers_over_a_full_disk_go_on_serving",
            ),
            (
                "    if row.turn == session.turn:\n        session.log_broken = False",
                "    session.log_broken = False",
                "an older state clears a broken log",
                "test/state_pool/test_pool_effects.py::test_an_older_state_does_not_mend_a_broken_log",
            ),
            (
                "    session.disk_turn, session.disk_tokens = row.turn, row.num_tokens\n",
                "    session.disk_turn, session.disk_tokens = session.turn, session.num_tokens\n",
                "a turn newer than the stored state counts as in it",
            ),
            (
                "        if session.deleted or self._store is None:\n                return  # whoever",
                "        if self._store is None:\n                return  # whoever",
                "a deleted session's whole-state turn is stored",
                f"{BETWEEN}::test_a_state_that_leaves_its_slot_when_its_session_is_deleted_is_not_stored[turn]",
            ),
            (
                "return has_log and session.unlogged == 0 and not self.is_due(session)",
                "return has_log and not self.is_due(session)",
                "a state is forgotten before its last turn is in the log",
                f"{BETWEEN}::test_a_state_may_go_only_when_its_last_turn_is_in_the_log",
            ),
            (
                "return session.dirty and (session.log_broken or session.log_tokens",
                "return session.dirty and (session.log_tokens",
                "a session with a gap in its log is never stored",
                f"{BETWEEN}::test_a_session_with_a_gap_in_its_log_is_stored_with_its_next_turn",
            ),
        ],
    ),
    *of(
        "state_pool/cache/slots.py",
        (SESSIONS, SINGLE_WORLDS, FIRST_WORLDS, WORLDS),
        [
            (
                "        self._holders[slot] += 1\n",
                "        self._holders[slot] = 1\n",
                "a slot is free while somebody reads it",
                "test/state_pool/test_pool_sessions.py::test_slots_are_counted",
            ),
            (
                "        if self._holders[slot] == 0:\n            heapq.heappush",
                "        if self._holders[slot] <= 1:\n            heapq.heappush",
                "a slot is given to two",
                "test/state_pool/test_pool_sessions.py::test_slots_are_counted",
            ),
            (
                "        slot = heapq.heappop(self._free)\n",
                "        slot = self._free.pop()\n",
                "the highest slot first: rows lie apart in memory",
                "test/state_pool/test_pool_sessions.py::test_the_lowest_free_slot_is_handed_out_first",
            ),
        ],
    ),
    *of(
        "state_pool/cache/prefix_cache.py",
        (PREFIX, EFFECTS, SINGLE_WORLDS, FIRST_WORLDS, MODEL, WORLDS),
        [
            (
                "return [entry for entry in bucket if len(entry.ids) < len(ids) and ids.startswith(entry.ids)]",
                "return [entry for entry in bucket if ids.startswith(entry.ids)]",
                "a hit on a prefix as long as the prompt: no token is left to read",
                "test/state_pool/test_pool_effects.py::test_a_hit_leaves_a_token_to_compute",
            ),
            (
                "or self._find(ids) is not None:",
                "or False:",
                "the same prefix is cached twice",
                "test/state_pool/test_pool_effects.py::test_the_same_prefix_is_cached_once",
            ),
            (
                "        self._l1.move_to_end(entry)\n",
                "",
                "FIFO instead of LRU",
                "test/state_pool/test_pool_effects.py::test_the_longest_unused_prefix_leaves_first",
            ),
            (
                "        del self._l2[entry]\n        entry.slot = self._tiers.load(host)\n",
                "        entry.slot = self._tiers.load(host)\n        self._l2.pop(entry, None)\n",
                "an entry is trimmed while it is brought back: the engine dies of it",
                "test/state_pool/test_pool_prefix.py::test_a_hit_in_host_memory_is_not_trimmed_by_the_room_that_is_made_for_it",
            ),
            (
                "        bucket.sort(key=lambda e: -len(e.ids))\n",
                "        bucket.sort(key=lambda e: len(e.ids))\n",
                "the shortest prefix is used",
            ),
            (
                "        if not self._tiers.pin(entry.slot):\n            return None\n        entry.used",
                "        entry.used",
                "a cached prefix is written over while a row reads it",
            ),
            (
                "if gain <= 0 or at - cached < _KEY_BYTES:",
                "if gain < 0:",
                "every prompt costs a state",
                "test/state_pool/test_pool_prefix.py::test_prompts_that_share_nothing_cost_no_state",
            ),
            (
                "        self._coming[ids[:at]] = None\n",
                "",
                "rows that wait together each read the common prefix",
                "test/state_pool/test_pool_prefix.py::test_prompts_that_wait_together_are_computed_once",
            ),
            (
                "        self._coming.pop(_packed(tokens, base), None)\n",
                "",
                "a border of a cancelled row is awaited for ever",
                "test/state_pool/test_pool_prefix.py::test_an_abandoned_border_is_not_waited_for",
            ),
            (
                "self._longest(ids) < longest < len(ids)",
                "self._longest(ids) < longest",
                "a prompt waits for a prefix as long as itself",
                f"{BETWEEN}::test_nobody_waits_for_a_prefix_as_long_as_his_prompt",
            ),
            (
                "        while len(self._l2) > self._config.prefix_cache_l2:\n",
                "        while False:\n",
                "prefixes fill host memory",
                "test/state_pool/test_pool_prefix.py::test_the_cache_is_bounded_on_both_tiers",
            ),
            (
                "if self._closed or entry.slot != slot or self._tiers.slots.holders(slot) != 1:",
                "if self._closed or entry.slot != slot:",
                "a prefix leaves its slot under a row that reads it",
                f"{BETWEEN}::test_a_prefix_that_is_read_again_while_it_leaves_stays_in_its_slot",
            ),
            (
                "            entry.host = host\n            self._l2[entry] = None\n            return False",
                "            return False",
                "a prefix that cannot be brought back is lost on the way",
                f"{BETWEEN}::test_a_prefix_for_which_there_is_no_slot_is_found_when_there_is_one",
            ),
        ],
        ci=(0, 3),
    ),
    *of(
        "state_pool/cache/prompt_history.py",
        (PREFIX,),
        [
            (
                "        while self._bytes > self._max_bytes:\n",
                "        while False:\n",
                "remembered prompts fill memory",
                "test/state_pool/test_pool_prefix.py::test_recent_prompts_are_bounded",
            ),
            (
                "self._buckets.popitem(last=False)",
                "self._buckets.popitem(last=True)",
                "the newest prompts are forgotten first",
                "test/state_pool/test_pool_prefix.py::test_the_prompts_met_last_are_remembered",
            ),
            (
                "        if observed and ids in others:\n            others.remove(ids)\n",
                "",
                "a prompt resembles itself: every one costs a state",
                "test/state_pool/test_pool_prefix.py::test_a_prompt_that_was_announced_is_not_its_own_likeness",
            ),
            (
                "(0 if known else _BUCKET_BYTES)",
                "0",
                "short prompts take ten times the memory they may",
                "test/state_pool/test_pool_prefix.py::test_recent_prompts_take_no_more_memory_than_they_may[33]",
            ),
        ],
    ),
]
