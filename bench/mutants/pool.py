"""Mutants of the state pool."""

from __future__ import annotations

from bench.mutants.mutant import Mutant, of

WORLDS = "test/simulation/test_simulation.py"
SINGLE_WORLDS = f"{WORLDS}::test_worlds_that_found_something"
FIRST_WORLDS = f"{WORLDS}::test_worlds[0]"
FAULTS = "test/state_pool/test_pool_faults.py"
SESSIONS = "test/state_pool/test_pool_sessions.py"
EFFECTS = "test/state_pool/test_pool_effects.py"
MODEL = "test/state_pool/test_pool_model.py"
PREFIX = "test/state_pool/test_pool_prefix.py"
DIALOGUES = "test/state_pool/test_pool_dialogues.py"
SHARED = "test/state_pool/test_pool_shared.py"
PORTABLE = "test/state_pool/test_pool_portable.py"
BETWEEN = "test/state_pool/test_pool_between.py"
DISK = "test/state_pool/test_pool_disk_effects.py"

MUTANTS: list[Mutant] = [
    *of(
        "state_pool/cache/tiers.py",
        (SESSIONS, EFFECTS, PREFIX, SINGLE_WORLDS, FIRST_WORLDS, FAULTS, MODEL, WORLDS),
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
        (SESSIONS, EFFECTS, SINGLE_WORLDS, FIRST_WORLDS, FAULTS, MODEL, WORLDS),
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
                "test/state_pool/test_pool_faults.py::test_full_tiers_over_a_full_disk_go_on_serving",
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
    *of(
        "state_pool/turns/turns.py",
        (SESSIONS, EFFECTS, DIALOGUES, SINGLE_WORLDS, FIRST_WORLDS, FAULTS, MODEL, WORLDS),
        [
            (
                "if not wait and (session.active is not None or session.queue or session.pending is not None):",
                "if not wait and (session.active is not None or session.queue):",
                "wait: false is not refused while the turn before is stored",
                "test/state_pool/test_pool_effects.py::test_a_turn_that_is_being_stored_is_busy_too",
            ),
            (
                '            if source.unusable is not None:\n                raise SessionUnusable(f"session {source.key.shown!r}: {source.unusable}")\n',
                "",
                "a branch from an unusable dialogue",
                "test/state_pool/test_pool_effects.py::test_no_branch_from_what_is_unusable_or_deleted",
            ),
            (
                "if source is None or not source.exists:",
                "if source is None:",
                "a branch from a dialogue that was never kept",
                f"{BETWEEN}::test_no_branch_from_a_dialogue_whose_turn_is_not_kept_yet",
            ),
            (
                "        self._refuse_when_full()\n        now = time.time()\n        # Its number",
                "        now = time.time()\n        # Its number",
                "a branch past the disk limit",
                "test/state_pool/test_pool_effects.py::test_no_branch_beyond_the_disk_limit",
            ),
            (
                "            self._refuse_when_full()\n            now",
                "            now",
                "a new session past the disk limit",
                "test/state_pool/test_pool_faults.py::test_the_disk_cap_refuses_new_sessions",
            ),
            (
                "        if session.unusable is not None and self.acquisition is None:\n",
                "        if False:\n",
                "a damaged session is fed",
                "test/state_pool/test_pool_faults.py::test_a_damaged_row_is_quarantined_and_the_rest_works",
            ),
            (
                "        if session.active is not None or session.pending is not None:\n            return\n",
                "        if session.active is not None:\n            return\n",
                "a turn begins before the one before is stored",
                "test/state_pool/test_pool_sessions.py::test_turns_of_one_session_come_in_order",
            ),
            (
                "            session.active = session.queue.pop(0)\n",
                "            session.active = session.queue.pop()\n",
                "turns of a session overtake each other",
                "test/state_pool/test_pool_sessions.py::test_turns_of_one_session_come_in_order",
            ),
            (
                "        turn = PendingTurn(session.turn + 1, list(tokens), on_durable)\n",
                "        turn = PendingTurn(session.turn + 1, tokens, on_durable)\n",
                "a recorded turn changes when the engine goes on with its list",
                f"{BETWEEN}::test_a_recorded_turn_is_what_it_was_when_it_was_recorded",
            ),
            (
                "        if turn.outcome is True and not session.deleted:\n",
                "        if turn.outcome is True:\n",
                "a deleted session's turn is acknowledged",
                f"{BETWEEN}::test_a_delete_between_the_log_and_the_state_wins[given up]",
            ),
            (
                "        session.num_tokens += len(turn.tokens)\n",
                "",
                "usage counts a session's history wrongly",
                "test/state_pool/test_pool_sessions.py::test_a_new_session_begins_from_zero_and_is_resumed_without_a_copy",
            ),
            (
                "        if turn.slot is None:\n            self._tiers.forget(session)  # the log gives it back\n            return\n",
                "        if turn.slot is None:\n            return\n",
                "after a failed step a session goes on from before its acknowledged turn",
                "test/state_pool/test_pool_sessions.py::test_a_turn_given_up_after_it_was_recorded",
            ),
            (
                "        elif turn.slot is not None:\n            self._tiers.slots.drop(turn.slot)\n        self.advance",
                "        self.advance",
                "a turn that was not stored leaks its slot",
            ),
            (
                "            if name == session_id or (delete_prefix and name.startswith(session_id)) or lease.source in doomed:\n                self._discard(lease.session)\n",
                "            pass\n",
                "a branch that runs outlives the delete of its session",
                "test/state_pool/test_pool_sessions.py::test_delete_wins_over_a_running_turn",
            ),
            (
                "self._tiers.unpin(lease.read_slot)\n            lease.pinned = False",
                "lease.pinned = False",
                "a slot that a turn read is never free again",
            ),
            (
                "                self._undeleted.append(rows)\n",
                "                pass\n",
                "a delete that the disk refused comes undone",
                "test/state_pool/test_pool_faults.py::test_a_failed_delete_is_told_and_tried_again",
            ),
            (
                "        if error is not None:\n            _tell(turn, error)\n",
                "        _tell(turn, error)\n",
                "an acknowledged session is 404 for a moment",
                f"{BETWEEN}::test_a_turn_is_acknowledged_when_whoever_asks_next_finds_it",
            ),
            (
                "            lease.state, lease.error = LeaseState.FAILED, error\n",
                "            pass\n",
                "a turn goes on in a deleted session",
                "test/state_pool/test_pool_sessions.py::test_delete_wins_over_a_running_turn",
            ),
            (
                "        if not session.exists and not session.deleted:\n            self._index.remove(session)\n",
                "",
                "sessions whose first turn was cancelled stay in memory for ever",
                f"{BETWEEN}::test_a_session_whose_first_turn_was_given_up_is_forgotten",
            ),
        ],
        ci=(11,),
    ),
    *of(
        "state_pool/turns/lease_queue.py",
        (SESSIONS, EFFECTS, SINGLE_WORLDS, FIRST_WORLDS, FAULTS, MODEL, WORLDS),
        [
            (
                "lease.read_slot, lease.replay = source.slot, list(source.replay)",
                "lease.read_slot, lease.replay = source.slot, []",
                "turns after a checkpoint are forgotten",
                "test/state_pool/test_pool_sessions.py::test_a_turn_given_up_after_it_was_recorded",
            ),
            (
                "        if session.loading or session.unlogged or self",
                "        if session.loading or self",
                "a state is read back before its last turn is on disk",
                f"{BETWEEN}::test_a_state_is_read_back_when_its_log_is_whole",
            ),
            (
                "        self._waiting.extendleft(reversed(kept))\n",
                "        self._waiting.extendleft(kept)\n",
                "leases that wait overtake each other",
                f"{BETWEEN}::test_who_waits_longer_for_a_slot_gets_it_first",
            ),
            (
                "        if session.deleted or session.slot is not None or session.host is not None:\n            return\n",
                "",
                "a deleted session comes back from disk",
                f"{BETWEEN}::test_a_session_that_is_deleted_while_it_is_read_stays_away",
            ),
            (
                "            lease.source.readers -= 1\n",
                "            pass\n",
                "sessions once read never leave their slot",
                f"{BETWEEN}::test_a_session_that_was_read_may_leave_again",
            ),
            (
                "        self._tiers.arriving -= 1\n",
                "",
                "after a few sessions none comes back from disk",
                f"{BETWEEN}::test_a_session_that_was_read_may_leave_again",
            ),
            (
                "        if isinstance(result, Damaged):\n            self._quarantine(session, str(result))\n",
                "",
                "damage is forgotten until the next turn",
                "test/state_pool/test_pool_faults.py::test_a_damaged_row_is_quarantined_and_the_rest_works",
            ),
        ],
    ),
    *of(
        "state_pool/turns/import_export.py",
        (PORTABLE, SINGLE_WORLDS, FIRST_WORLDS, WORLDS),
        [
            (
                "        if self._index.get(key) is not None:\n",
                "        if False:\n",
                "an import replaces a session",
                "test/state_pool/test_pool_portable.py::test_what_is_refused",
            ),
            (
                "            self._delete_rows((session.row,))\n",
                "",
                "half of a failed import comes back with a restart",
                f"{BETWEEN}::test_nothing_is_left_of_an_import_that_failed",
            ),
            (
                "            session.row = self._store.next_row()  # who",
                "            pass  # who",
                "a turn behind a failed import is deleted with it",
                f"{BETWEEN}::test_who_waited_for_an_import_that_failed_begins_anew",
            ),
            (
                "        if session.slot is None and session.host is None and session.unlogged:\n",
                "        if False:\n",
                "an export just after a turn fails as damaged",
                f"{BETWEEN}::test_an_export_comes_when_the_log_is_whole",
            ),
            (
                "        self._under_way -= 1\n        session.pending = None\n",
                "        session.pending = None\n",
                "after two imports no other is taken",
                f"{BETWEEN}::test_one_import_after_the_other_is_taken",
            ),
            (
                "        if self._under_way >= AT_ONCE:\n",
                "        if False:\n",
                "any number of exports hold states in memory",
                "test/state_pool/test_pool_portable.py::test_few_sessions_are_carried_at_once",
            ),
        ],
    ),
    *of(
        "state_pool/disk/applier.py",
        (EFFECTS, SESSIONS, SHARED, SINGLE_WORLDS, FIRST_WORLDS, FAULTS, WORLDS),
        [
            (
                "        statements.trim_turns(connection, session.row, session.turn, session.num_tokens, self._retain)\n",
                "",
                "the log grows for ever",
                "test/state_pool/test_pool_faults.py::test_the_log_keeps_what_is_asked",
            ),
            (
                "        if job.commits is not None and self._retain:\n",
                "        if False:\n",
                "--retain-tokens keeps nothing with durability turn",
                "test/state_pool/test_pool_faults.py::test_a_whole_history_rebuilds_a_damaged_state",
            ),
        ],
    ),
    *of(
        "state_pool/disk/directory.py",
        (SHARED,),
        [
            (
                "    if changed.rowcount != 1:\n        raise stale(fence)\n",
                "",
                "an engine that was cut off goes on acknowledging",
                f"{SHARED}::test_one_that_was_cut_off_computes_and_acknowledges_nothing[sqlite-log]",
            ),
            (
                "    if busy and holder != engine and alive is not None:\n        return\n",
                "",
                "a turn that runs on another engine is taken over",
                f"{SHARED}::test_a_turn_elsewhere_is_waited_for",
            ),
            (
                "    if busy and holder != engine and alive is not None:\n",
                "    if busy and holder != engine:\n",
                "a session of a killed engine is busy for ever",
                f"{SHARED}::test_what_a_killed_or_stopped_engine_acknowledged_is_there",
            ),
            (
                "        if parent.rowcount != 1:\n",
                "        if False:\n",
                "a dialogue outlives the delete of what it was read from",
                f"{SHARED}::test_no_branch_from_a_dialogue_that_was_deleted_elsewhere",
            ),
        ],
        ci=(0,),
    ),
    *of(
        "state_pool/turns/acquisition.py",
        (SHARED,),
        [
            (
                "        if (session.row, session.turn) != (row.row, row.turn):\n",
                "        if False:\n",
                "an engine goes on from before another one's turns",
                f"{SHARED}::test_a_session_goes_on_wherever_its_next_turn_is_asked_for",
            ),
        ],
    ),
    *of(
        "state_pool/disk/writer.py",
        (EFFECTS, "test/state_pool/test_pool_threads.py", SESSIONS, SINGLE_WORLDS, FIRST_WORLDS, FAULTS, WORLDS),
        [
            (
                "        if error is not None and len(group) > 1 and not is_outside(error):\n",
                "        if False:\n",
                "one bad turn fails its whole group",
                "test/state_pool/test_pool_effects.py::test_one_bad_turn_fails_alone",
            ),
            (
                "            while staging.chunks and (written == 0 or not self._small):\n",
                "            while staging.chunks:\n",
                "turns wait for a whole state",
                "test/state_pool/test_pool_effects.py::test_a_turn_goes_before_the_rest_of_a_state",
            ),
            (
                "        self._discard(garbage)\n        self._succeeded",
                "        self._succeeded",
                "pieces of deleted states are never collected",
                "test/state_pool/test_pool_effects.py::test_pieces_of_a_deleted_state_are_collected",
            ),
            (
                "        self._discard(old)\n        with self._changed",
                "        with self._changed",
                "pieces of replaced states are never collected",
                "test/state_pool/test_pool_effects.py::test_pieces_of_a_replaced_state_are_collected",
            ),
            (
                "                self._give_up(staging)\n            self._changed.notify()\n",
                "                pass\n            self._changed.notify()\n",
                "pieces of failed states are never collected",
                "test/state_pool/test_pool_effects.py::test_pieces_of_a_state_that_failed_are_collected",
            ),
            (
                "            if isinstance(job, Delete):\n                self._forget_states(set(job.rows))\n",
                "",
                "a deleted session's state comes back",
                "test/state_pool/test_pool_faults.py::test_a_delete_overtakes_a_state_that_waits_to_be_written",
            ),
            (
                "            self._give_up(staged)\n            self._report",
                "            self._report",
                "pieces of deleted, half written states are never collected",
                f"{DISK}::test_pieces_of_a_state_that_is_deleted_half_written_are_collected[between two]",
            ),
            (
                "        if self._connection.in_transaction:\n",
                "        if False:\n",
                "after one failed write every other fails",
                "test/state_pool/test_pool_faults.py::test_a_turn_that_cannot_be_stored_is_not_acknowledged",
            ),
            (
                "        self.stats.degraded = None\n        self._log.written(num_bytes)",
                "        self._log.written(num_bytes)",
                "the service stays degraded after the disk has recovered",
                "test/state_pool/test_pool_faults.py::test_a_turn_that_cannot_be_stored_is_not_acknowledged",
            ),
            (
                "        except Exception as error:  # noqa: BLE001 - a number",
                "        except sqlite3.Error as error:  # noqa: BLE001 - a number",
                "one import ends the writer: no turn is acknowledged any more",
                "test/state_pool/test_pool_threads.py::test_a_number_that_sqlite_cannot_hold_is_its_jobs_failure",
            ),
            (
                "            if not self._staged.finish(staging):\n                return  # a delete",
                "            if not self._staged.finish(staging) and False:\n                return  # a delete",
                "a delete that overtook a state is told as a success of it",
                f"{DISK}::test_a_delete_that_overtakes_the_last_piece_of_a_state_is_its_failure",
            ),
        ],
        ci=(1,),
    ),
    *of(
        "state_pool/disk/reader.py",
        ("test/state_pool/test_pool_threads.py", SINGLE_WORLDS, FIRST_WORLDS, FAULTS, PORTABLE, WORLDS),
        [
            (
                '            self._connection.execute("ROLLBACK")\n',
                "            pass\n",
                "the reader sees the database of its first read",
            ),
            (
                '            return SessionUnread(f"the session could not be read ({error}); try again")\n',
                '            return Damaged(f"the session could not be read ({error}); try again")\n',
                "a disk error condemns a session for good",
                f"{DISK}::test_a_disk_that_fails_once_condemns_no_session",
            ),
            (
                "        except Exception as error:  # out of memory",
                "        except KeyError as error:  # out of memory",
                "one failure ends the reader: every session on disk waits for ever",
                "test/state_pool/test_pool_threads.py::test_a_session_that_cannot_be_read_fails_alone",
            ),
            (
                "            return Loaded(None, replay, 4 * len(replay), num_tokens)\n",
                "            return Loaded(None, [], 0, num_tokens)\n",
                "a session that was never checkpointed comes back empty",
                f"{DISK}::test_a_session_without_a_state_comes_back_by_its_log",
            ),
        ],
    ),
    *of(
        "state_pool/disk/statements.py",
        (SESSIONS, EFFECTS, SINGLE_WORLDS, FIRST_WORLDS, FAULTS, MODEL, WORLDS),
        [
            (
                "if turn != (1 if found is None else int(found[0]) + 1):",
                "if False:",
                "a turn may be missing or applied twice",
                "test/state_pool/test_pool_faults.py::test_turns_are_taken_in_order_and_once",
            ),
            (
                "        return False\n    garbage +=",
                "        pass\n    garbage +=",
                "a parent is removed under dialogues that need it",
                f"{DISK}::test_a_parent_stays_while_a_dialogue_needs_it",
            ),
            (
                "WHERE excluded.turn > sessions.turn",
                "",
                "an older state moves its session back",
                f"{DISK}::test_an_older_state_does_not_move_its_session_back",
            ),
            (
                '"DELETE FROM turns WHERE session = ? AND turn <= ? AND num_tokens <= ?", (session, turn, num_tokens - retain)',
                '"DELETE FROM turns WHERE session = ? AND turn <= ? AND num_tokens <= ?", (session, turn + 1, num_tokens + 10**6)',
                "the turn after a checkpoint leaves the log with it",
                "test/state_pool/test_pool_faults.py::test_the_log_keeps_what_is_asked",
            ),
            (
                "    return gone < limit\n",
                "    return True\n",
                "most pieces of a state stay for ever",
                f"{DISK}::test_all_pieces_of_a_state_are_collected",
            ),
            (
                "        needed = [row for row in left if not _removed(connection, row, garbage)]\n        if not needed or",
                "        needed = [row for row in left[::-1] if not _removed(connection, row, garbage)]\n        if True or",
                "dialogues deleted together stay on disk",
                f"{DISK}::test_dialogues_that_are_deleted_together_go_together",
            ),
        ],
    ),
    *of(
        "state_pool/disk/verify.py",
        (SINGLE_WORLDS, FIRST_WORLDS, FAULTS, PORTABLE, WORLDS),
        [
            (
                "            if piece_checksum(data, at) != digest or at != low + len(chunks):\n",
                "            if at != low + len(chunks):\n",
                "a damaged state is fed",
                "test/state_pool/test_pool_faults.py::test_a_damaged_row_is_quarantined_and_the_rest_works",
            ),
            (
                "            if turn != expected or checksum(data, session, turn) != digest:\n",
                "            if turn != expected:\n",
                "a damaged turn is fed",
                "test/state_pool/test_pool_faults.py::test_a_damaged_log_is_quarantined",
            ),
            (
                "        if expected != last:\n",
                "        if False:\n",
                "a missing turn is not noticed",
                "test/state_pool/test_pool_faults.py::test_a_damaged_log_is_quarantined",
            ),
            (
                '        if fingerprint != self._fingerprint:\n            return SessionUnusable(\n                f"the session belongs to another model (f',
                '        if False:\n            return SessionUnusable(\n                f"the session belongs to another model (f',
                "another model's state is fed",
                "test/state_pool/test_pool_faults.py::test_another_model_is_refused_and_its_sessions_stay",
            ),
            (
                "            replay = self._log(wanted, base, int(turn), why_not) + replay\n",
                "            replay = replay + self._log(wanted, base, int(turn), why_not)\n",
                "turns of a dialogue and its parent change places",
            ),
        ],
    ),
]
