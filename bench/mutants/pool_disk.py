"""Mutants of the state pool's database."""

from __future__ import annotations

from bench.mutants.mutant import Mutant, of
from bench.mutants.pool_tests import (
    DAMAGED,
    DISK,
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
        "state_pool/disk/applier.py",
        (EFFECTS, SESSIONS, SHARED, KILLED, SINGLE_WORLDS, FIRST_WORLDS, *FAULTS, WORLDS),
        [
            (
                "        statements.trim_turns(connection, session.row, session.turn, session.num_tokens, self._retain)\n",
                "",
                "the log grows for ever",
                f"{DISK}::test_the_log_keeps_what_is_asked",
            ),
            (
                "        if job.commits is not None and self._retain:\n",
                "        if False:\n",
                "--retain-tokens keeps nothing with durability turn",
                f"{DAMAGED}::test_a_whole_history_rebuilds_a_damaged_state",
            ),
        ],
    ),
    *of(
        "state_pool/disk/directory.py",
        (SHARED, KILLED),
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
                f"{KILLED}::test_what_a_killed_or_stopped_engine_acknowledged_is_there",
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
        "state_pool/disk/writer.py",
        (EFFECTS, "test/state_pool/test_pool_threads.py", SESSIONS, SINGLE_WORLDS, FIRST_WORLDS, *FAULTS, WORLDS),
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
                f"{DISK}::test_a_delete_overtakes_a_state_that_waits_to_be_written",
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
                f"{FAILING_DISK}::test_a_turn_that_cannot_be_stored_is_not_acknowledged",
            ),
            (
                "        self.stats.degraded = None\n        self._log.written(num_bytes)",
                "        self._log.written(num_bytes)",
                "the service stays degraded after the disk has recovered",
                f"{FAILING_DISK}::test_a_turn_that_cannot_be_stored_is_not_acknowledged",
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
        ("test/state_pool/test_pool_threads.py", SINGLE_WORLDS, FIRST_WORLDS, *FAULTS, PORTABLE, WORLDS),
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
        (SESSIONS, EFFECTS, SINGLE_WORLDS, FIRST_WORLDS, *FAULTS, MODEL, WORLDS),
        [
            (
                "if turn != (1 if found is None else int(found[0]) + 1):",
                "if False:",
                "a turn may be missing or applied twice",
                f"{DISK}::test_turns_are_taken_in_order_and_once",
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
                f"{DISK}::test_the_log_keeps_what_is_asked",
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
        (SINGLE_WORLDS, FIRST_WORLDS, *FAULTS, PORTABLE, WORLDS),
        [
            (
                "            if piece_checksum(data, at) != digest or at != low + len(chunks):\n",
                "            if at != low + len(chunks):\n",
                "a damaged state is fed",
                f"{DAMAGED}::test_a_damaged_row_is_quarantined_and_the_rest_works",
            ),
            (
                "            if turn != expected or checksum(data, session, turn) != digest:\n",
                "            if turn != expected:\n",
                "a damaged turn is fed",
                f"{DAMAGED}::test_a_damaged_log_is_quarantined",
            ),
            (
                "        if expected != last:\n",
                "        if False:\n",
                "a missing turn is not noticed",
                f"{DAMAGED}::test_a_damaged_log_is_quarantined",
            ),
            (
                '        if fingerprint != self._fingerprint:\n            return SessionUnusable(\n                f"the session belongs to another model (f',
                '        if False:\n            return SessionUnusable(\n                f"the session belongs to another model (f',
                "another model's state is fed",
                f"{DAMAGED}::test_another_model_is_refused_and_its_sessions_stay",
            ),
            (
                "            replay = self._log(wanted, base, int(turn), why_not) + replay\n",
                "            replay = replay + self._log(wanted, base, int(turn), why_not)\n",
                "turns of a dialogue and its parent change places",
            ),
        ],
    ),
    *of(
        "state_pool/disk/transfers.py",
        ("test/state_pool/test_pool_hung_store.py",),
        [
            (
                "or self._jobs[0] is None or not nobody_else_will()",
                "or not nobody_else_will()",
                "a thread that is to end does not, and the engine's end waits for it",
                "test/state_pool/test_pool_hung_store.py::test_a_thread_that_is_back_finds_that_it_is_to_end",
            ),
        ],
    ),
]
