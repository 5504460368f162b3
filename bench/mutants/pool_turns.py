"""Mutants of the state pool's turns."""

from __future__ import annotations

from bench.mutants.mutant import Mutant, of
from bench.mutants.pool_tests import (
    BETWEEN,
    DAMAGED,
    DIALOGUES,
    EFFECTS,
    FAILING_DISK,
    FAULTS,
    FIRST_WORLDS,
    KILLED,
    MODEL,
    PORTABLE,
    SESSIONS,
    SHARED,
    SINGLE_WORLDS,
    WORLDS,
)

MUTANTS: list[Mutant] = [
    *of(
        "state_pool/turns/turns.py",
        (SESSIONS, EFFECTS, DIALOGUES, SINGLE_WORLDS, FIRST_WORLDS, *FAULTS, MODEL, WORLDS),
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
                f"{FAILING_DISK}::test_the_disk_cap_refuses_new_sessions",
            ),
            (
                "        if session.unusable is not None and self.acquisition is None:\n",
                "        if False:\n",
                "a damaged session is fed",
                f"{DAMAGED}::test_a_damaged_row_is_quarantined_and_the_rest_works",
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
                f"{FAILING_DISK}::test_a_failed_delete_is_told_and_tried_again",
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
        (SESSIONS, EFFECTS, SINGLE_WORLDS, FIRST_WORLDS, *FAULTS, MODEL, WORLDS),
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
                f"{DAMAGED}::test_a_damaged_row_is_quarantined_and_the_rest_works",
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
        "state_pool/turns/acquisition.py",
        (SHARED, KILLED),
        [
            (
                "        if (session.row, session.turn) != (row.row, row.turn):\n",
                "        if False:\n",
                "an engine goes on from before another one's turns",
                f"{SHARED}::test_a_session_goes_on_wherever_its_next_turn_is_asked_for",
            ),
        ],
    ),
]
