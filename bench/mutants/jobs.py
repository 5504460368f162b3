"""Mutants of jobs and of their rows' states."""

from __future__ import annotations

from bench.mutants.mutant import Mutant, of

WORLDS = "test/simulation/test_simulation.py"
SINGLE_WORLDS = f"{WORLDS}::test_worlds_that_found_something"
JOBS = (
    SINGLE_WORLDS,
    "test/engine/test_row_ends.py",
    f"{WORLDS}::test_worlds[0]",
    "test/engine/test_engine.py",
    "test/engine/test_engine_sessions.py",
    "test/engine/test_engine_parts.py",
    WORLDS,
)

MUTANTS: list[Mutant] = [
    *of(
        "rwkv_batch/core/job_table.py",
        (*JOBS, "test/engine/test_giving_way.py"),
        [
            (
                "if sequence.phase is not running or sequence.settled_step == step:",
                "if sequence.settled_step == step:",
                "a token is taken for a row that has ended",
            ),
            (
                "                self._keeper.take_back(sequence)\n",
                "",
                "each turn that ends by a stop reads its session anew",
                "test/engine/test_engine_sessions.py::test_a_stop_makes_nothing_be_read_again",
            ),
            (
                "                sequence.token_ids[sequence.prompt_end + len(output.tokens) - 1] = token\n",
                "                pass\n",
                "the drawn token is never known",
                "test/simulation/test_simulation.py::test_worlds[120]",
            ),
            (
                "                self._keeper.update_rollback_state(sequence)\n",
                "                pass\n",
                "every stop across tokens reads its session anew",
                "test/engine/test_engine_sessions.py::test_a_stop_makes_nothing_be_read_again",
            ),
            (
                "        sequence.job.live.pop(sequence)\n        sequence.job.live.update",
                "        sequence.job.live.update",
                "a forked parent stays live: each row ends twice",
                "test/engine/test_row_ends.py::test_a_prompt_read_for_several_ends_each_row_once",
            ),
            (
                "        self._scheduler.add_forked(children)\n",
                "        self._scheduler.add(sequence.job, children)\n",
                "rows that share a prompt go behind all others",
            ),
            (
                "        self._scheduler.give_up_seat(sequence)\n        sequence.phase = Phase.CLOSING\n",
                "        sequence.phase = Phase.CLOSING\n",
                "a turn being stored keeps its place",
                "test/engine/test_row_ends.py::test_a_turn_that_has_its_answer_gives_its_place_to_the_next_row",
            ),
            (
                "            self._leased.pop(sequence, None)\n            self._send_finish",
                "            self._send_finish",
                "an ended turn is asked about at every step",
            ),
            (
                "FinishReason.ERROR if error else reason, error.info if error else None)\n\n        self._keeper.record",
                "reason, None)\n\n        self._keeper.record",
                "a turn that was not stored is acknowledged",
            ),
            (
                "        sequence.output.give_up_holding()\n",
                "",
                "held text is lost at a timeout",
                "test/engine/test_row_ends.py::test_text_held_for_a_stop_is_shown_at_a_timeout",
            ),
            (
                "            return  # the job was cancelled meanwhile\n",
                "            pass\n",
                "a cancelled row ends twice",
            ),
            (
                "            job.unfinished -= 1\n",
                "            job.unfinished -= 1 if row == sequence.row else 0\n",
                "a cancelled job of n > 1 never ends",
                "test/engine/test_row_ends.py::test_a_shared_prompt_that_is_cancelled_ends_all_the_rows_it_stands_for",
            ),
            (
                "if not sequence.has_answered:\n                self._end(sequence, reason)\n",
                "if True:\n                self._end(sequence, reason)\n",
                'a kept turn is told "timeout"',
                "test/engine/test_row_ends.py::test_a_turn_that_is_kept_is_not_told_that_it_timed_out",
            ),
            (
                "            elif reason is not FinishReason.TIMEOUT:\n",
                "            else:\n",
                'a turn being stored is told "timeout"',
                "test/engine/test_row_ends.py::test_a_turn_that_is_kept_is_not_told_that_it_timed_out",
            ),
            (
                "                self._forget_waiting(sequence)\n",
                "",
                "a queued row of a deleted session stays",
                "test/engine/test_row_ends.py::test_a_queued_turn_of_a_deleted_session_leaves_the_queue",
            ),
            (
                "        self._scheduler.forget_waiting(job)\n        for sequence in list(job.live):",
                "        for sequence in list(job.live):",
                "rows of a cancelled job start later",
                "test/engine/test_row_ends.py::test_continuations_of_a_cancelled_job_leave_the_queue",
            ),
            (
                "        job.live.clear()  # the error is all that is sent\n",
                "",
                "rows of a failed job send more news",
                "test/engine/test_row_ends.py::test_a_failed_job_tells_nothing_behind_its_error",
            ),
            (
                "if self._jobs.get(job.job_id) is job:\n                self._end_job(job, FinishReason.TIMEOUT)",
                "if job.job_id in self._jobs:\n                self._end_job(self._jobs[job.job_id], FinishReason.TIMEOUT)",
                "a deadline ends a later job of the same id",
                "test/engine/test_row_ends.py::test_a_deadline_is_that_of_its_job_and_of_no_later_one_of_the_same_id",
            ),
            (
                "            if row in job.live:  # else it ended",
                "            if True:  # else it ended",
                "scores of an ended row",
                "test/engine/test_row_ends.py::test_a_failed_job_tells_nothing_behind_its_error",
            ),
            (
                "for sequence in [row.sequence for row in rows if row.ends]:",
                "for sequence in ():",
                "only read, never ended",
                "test/engine/test_prompt_scoring.py::test_a_row_that_only_reads",
            ),
            (
                "            done = job.unfinished == 0\n",
                "            done = bool(job.deltas)\n",
                "the first news of a job is its last",
            ),
            (
                "if sequence.shared is None and sequence.spare_slot == NO_SLOT and not several:",
                "if sequence.spare_slot == NO_SLOT and not several:",
                "a row that begins from another's state never lets go of it",
            ),
            (
                "return has_forked and any(0 <=",
                "return False and any(0 <=",
                "rows go on from a prompt whose step failed",
            ),
        ],
        ci=(8,),
    ),
    *of(
        "rwkv_batch/core/job_rows.py",
        (*JOBS, "test/engine/test_giving_way.py"),
        [
            (
                "if waiting + job.num_rows > limit:",
                "if waiting > limit:",
                "one job may overfill the queue",
                "test/engine/test_engine.py::test_queue_is_bounded_and_a_refused_job_leaves_nothing",
            ),
            (
                "if job.client and waiting + job.num_rows > share:",
                "if False:",
                "one client fills the queue",
                "test/engine/test_giving_way.py::test_a_client_has_a_queue_place_of_its_own",
            ),
            (
                "if any(request.session is not None for request in job.rows) and job.num_rows != 1:",
                "if False:",
                "two rows of a request write one session",
                "test/engine/test_engine.py::test_what_is_no_turn_of_a_session_is_refused",
            ),
            (
                "if not request.prompt or not resume:",
                "if not request.prompt:",
                "an empty turn reaches the model",
                "test/engine/test_engine.py::test_what_is_no_turn_of_a_session_is_refused",
            ),
            ("seed=(sampling.seed + i) % (1 << 64)", "seed=sampling.seed", "all n answers are the same"),
            (
                'logit_bias={**sampling.logit_bias, END_OF_TEXT: float("-inf")}',
                "logit_bias=dict(sampling.logit_bias)",
                "ignore_eos feeds the end token",
            ),
            (
                "request.num_rows > 1 and len(request.prompt) > 1",
                "False",
                "every answer of n reads the prompt again",
                "test/engine/test_row_ends.py::test_a_shared_prompt_that_is_cancelled_ends_all_the_rows_it_stands_for",
            ),
            (
                "            number += request.num_rows\n",
                "            number += 1\n",
                "rows of n > 1 bear other rows' numbers",
            ),
        ],
    ),
    *of(
        "rwkv_batch/core/state_manager.py",
        JOBS,
        [
            (
                "return fresh and alone and sequence.request.use_prefix_cache",
                "return fresh and alone",
                "use_prefix_cache: false is ignored",
                "test/engine/test_row_ends.py::test_a_row_that_wants_no_cached_prefix_leaves_none",
            ),
            (
                "is_ready = sequence.lease.state is LeaseState.READY",
                "is_ready = True",
                "a turn starts before the one before it is stored",
            ),
            (
                "if _may_share_prefix(sequence) and self.pool.awaits_prefix(sequence.reusable_ids, sequence.base):",
                "if False:",
                "rows that wait together each read the common prefix",
                "test/engine/test_row_ends.py::test_a_border_of_a_cancelled_row_is_not_awaited",
            ),
            (
                "sequence.token_ids = [*lease.replay, *turn.resume_prompt]",
                "sequence.token_ids = [*turn.resume_prompt]",
                "after a crash the logged turns are forgotten",
            ),
            (
                "sequence.turn_start = len(lease.replay)",
                "sequence.turn_start = 0",
                "replayed tokens are logged again as part of the turn",
            ),
            (
                "        if sequence.keeps_last_state:\n            sequence.slot, sequence.spare_slot = sequence.spare_slot, sequence.slot\n",
                "",
                "a session without its last state runs ahead",
            ),
            (
                "            self.pool.abandon_cache_point(prefix, sequence.base)\n            if fresh",
                "            if fresh",
                "rows wait for ever for a prefix that was refused",
                "test/engine/test_row_ends.py::test_a_border_whose_state_is_not_cached_is_not_awaited",
            ),
            (
                "            if fresh is not None:\n                self.pool.free(fresh)\n            return",
                "            return",
                "a slot leaks when the prefix cache refuses",
                "test/engine/test_row_ends.py::test_a_border_whose_state_is_not_cached_is_not_awaited",
            ),
            (
                "SharedSlot(slot, lambda: self.pool.free(slot), len(children))",
                "SharedSlot(slot, lambda: self.pool.free(slot), 1)",
                "the shared prompt's slot is given away while others read it",
            ),
            (
                "        sequence.num_computed_tokens = min(sequence.num_computed_tokens, end)\n",
                "",
                "tokens past the stop stay",
                "test/engine/test_engine_sessions.py::test_a_stop_inside_tokens_is_not_in_the_state",
            ),
            (
                "if sequence.num_computed_tokens > end and sequence.lease is not None:",
                "if False:",
                "a stop read ahead stays in the session",
                "test/engine/test_engine_sessions.py::test_a_stop_inside_tokens_is_not_in_the_state",
            ),
            (
                "        self._abandon_borders(sequence)\n        sequence.cache_points = []\n",
                "        sequence.cache_points = []\n",
                "a cache border of a cancelled row is awaited for ever",
                "test/engine/test_row_ends.py::test_a_border_of_a_cancelled_row_is_not_awaited",
            ),
            (
                "        sequence.cache_points = []\n        if sequence.shared is not None:\n            sequence.shared.drop()\n            sequence.shared = None\n",
                "        sequence.cache_points = []\n",
                "a shared slot is not dropped at a cancel",
            ),
            (
                "        self._drop_rollback_state(sequence)\n        self._drop_spare_slot(sequence)\n        if sequence.slot",
                "        self._drop_spare_slot(sequence)\n        if sequence.slot",
                "a cancelled row's kept state leaks",
            ),
            (
                "        self._drop_rollback_state(sequence)\n        self._drop_spare_slot(sequence)\n        self.pool.checkin",
                "        self._drop_rollback_state(sequence)\n        self.pool.checkin",
                "a turn's spare slot leaks",
            ),
            (
                "            self.pool.release(sequence.lease)\n",
                "            pass\n",
                "a cancelled turn blocks its session",
                "test/engine/test_engine_sessions.py::test_cancelled_and_timed_out_turns_leave_the_session_as_it_was",
            ),
            (
                "self.pool.record(lease, token_ids[sequence.turn_start :], durable)",
                "self.pool.record(lease, sequence.token_ids[sequence.turn_start :], durable)",
                "the log keeps what the stop cut",
            ),
            (
                "whole + (self._tokenizer.encode_bytes(partial) if partial else [])",
                "whole",
                "the shown part of a cut token is missing from the session",
                "test/engine/test_engine_sessions.py::test_a_stop_inside_tokens_is_not_in_the_state",
            ),
            (
                "            sequence.dialogue_idx = lease.dialogue_idx\n",
                "",
                "a branching turn does not tell its number",
                "test/engine/test_engine_sessions.py::test_branches_leave_their_parent_alone",
            ),
            (
                "turn.session_id, turn.branch_from, turn.wait, state, adapter, origin",
                "turn.session_id, turn.branch_from, True, state, adapter, origin",
                "wait: false waits",
                "test/engine/test_engine_sessions.py::test_turns_of_one_session_keep_their_order",
            ),
            (
                "        sequence.num_computed_tokens = 0\n        sequence.shared = SharedSlot(lease.read_slot, lambda: None)\n",
                "        sequence.num_computed_tokens = 0\n",
                "after a rewind the session begins from the zero state",
            ),
        ],
        ci=(1, 3, 12),
    ),
    *of(
        "rwkv_batch/core/sequence.py",
        (*JOBS,),
        [
            (
                "        if self._readers == 0:\n",
                "        if self._readers <= 1:\n",
                "a shared slot is given back before its last reader has moved on",
            ),
            (
                "return self.slot if self.num_computed_tokens else ZERO_SLOT",
                "return self.slot",
                "a fresh row begins from what an earlier one left",
            ),
            (
                "self.token_ids[: self.scored.start] if self.scored else self.token_ids",
                "self.token_ids",
                "a scored prompt begins behind tokens that it should tell of",
                "test/engine/test_prompt_scoring.py::test_a_cached_prefix_is_no_further_than_what_is_scored",
            ),
            (
                "return self.spare_slot if self.keeps_last_state else self.slot",
                "return self.slot",
                "the state before a possible stop is overwritten",
            ),
            (
                "or len(self.token_ids) - self.prompt_end >= self.request.max_tokens:",
                "or False:",
                "a row reads past its last token",
                "test/engine/test_scheduler.py::test_a_row_whose_last_token_is_being_drawn_is_in_no_further_step",
            ),
            (
                "return self.lease is None or self.spare_slot != NO_SLOT",
                "return True",
                "a session without a spare slot runs ahead",
            ),
            (
                "return self.phase in (Phase.CLOSING, Phase.ANSWERED)",
                "return self.phase is not Phase.RUNNING",
                "a waiting row counts as one that has answered: a cancel forgets it",
                "test/engine/test_row_ends.py::test_continuations_of_a_cancelled_job_leave_the_queue",
            ),
        ],
        ci=(1, 3),
    ),
]
