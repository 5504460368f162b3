"""Mutants of what decides: scheduler, jobs, states of rows, output."""

from __future__ import annotations

from bench.mutants.mutant import Mutant, of

WORLDS = "test/simulation/test_simulation.py"
SINGLE_WORLDS = f"{WORLDS}::test_worlds_that_found_something"
SCHEDULER = (
    "test/engine/test_scheduler.py",
    "test/engine/test_fairness.py",
    f"{WORLDS}::test_worlds[0]",
    "test/engine/test_giving_way.py",
    "test/engine/test_row_ends.py",
    WORLDS,
)
JOBS = (
    SINGLE_WORLDS,
    "test/engine/test_row_ends.py",
    f"{WORLDS}::test_worlds[0]",
    "test/engine/test_engine.py",
    "test/engine/test_engine_sessions.py",
    "test/engine/test_engine_parts.py",
    WORLDS,
)
OUTPUT = (
    "test/engine/test_output.py",
    SINGLE_WORLDS,
    f"{WORLDS}::test_worlds[0]",
    "test/engine/test_engine_sessions.py",
    WORLDS,
)

MUTANTS: list[Mutant] = [
    *of(
        "rwkv_batch/core/batch_share.py",
        ("test/engine/test_batch_share.py", "test/engine/test_fairness.py"),
        [
            (
                'key=attrgetter("in_step")',
                'key=attrgetter("first_slot")',
                "beside interactive requests the same few batch rows decode for ever",
            ),
            (
                "if self._interactive.num_rows:",
                "if self._interactive.num_running:",
                "a request that waits for its session waits for long steps",
            ),
            (
                "        if not self._reading:\n            self._steps_aside = 0\n",
                "",
                "every fourth request meets a batch",
            ),
        ],
    ),
    *of(
        "rwkv_batch/core/scheduler.py",
        (*SCHEDULER[:-1], "test/engine/test_session_slots.py", "test/engine/test_micro_batches.py", WORLDS),
        [
            (
                "budget = limits.prefill_tokens_beside if rows else limits.prefill_tokens_per_step",
                "budget = limits.prefill_tokens_per_step",
                "decoding rows wait for whole prompts",
                "test/engine/test_scheduler.py::test_fewer_prompt_tokens_are_read_while_rows_decode",
            ),
            (
                "if sequence.cache_points:\n",
                "if False:\n",
                "no prompt prefix is ever cached",
                "test/engine/test_scheduler.py::test_a_border_ends_a_chunk",
            ),
            (
                "limit = min(limit, sequence.cache_points[0] - sequence.num_computed_tokens)",
                "limit = min(limit, sequence.cache_points[0])",
                "a second row passes the border worth caching",
                "test/simulation/test_simulation.py::test_worlds[0]",
            ),
            (
                "draws=is_last and sequence.draws and not ends",
                "draws=sequence.draws and not ends",
                "a token is drawn in the middle of a prompt",
                "test/engine/test_scheduler.py::test_prompts_are_read_in_chunks_within_the_budget",
            ),
            (
                "limit = min(sequence.num_uncomputed_tokens, "
                "max(1, self.limits.prefill_chunk // (1 + len(sequence.members))))",
                "limit = sequence.num_uncomputed_tokens",
                "one long prompt fills a step",
                "test/engine/test_scheduler.py::test_prompts_are_read_in_chunks_within_the_budget",
            ),
            (
                "ScheduledRow(sequence, 1, sequence.draws, feeds_back,",
                "ScheduledRow(sequence, 1, True, feeds_back,",
                "a closing turn draws one more token",
                "test/engine/test_row_ends.py::test_a_turn_that_has_its_answer_gives_its_place_to_the_next_row",
            ),
            (
                "(sequence.in_step <= oldest and len(ids) < row.most_ids)",
                "len(ids) < row.most_ids",
                "a row runs as far ahead as the stages have room, and draws in vain when it ends",
                "test/engine/test_micro_batches.py::test_a_row_is_launched_one_step_ahead_of_what_is_read_and_no_more",
            ),
            (
                "(sequence.in_step <= oldest and len(ids) < row.most_ids)",
                "sequence.in_step <= oldest",
                "a plain row reads past its last token",
                "test/engine/test_scheduler.py::test_a_row_whose_last_token_is_being_drawn_is_in_no_further_step",
            ),
            (
                "        self.places.give_up_seat(sequence)\n        self.leave(sequence)\n",
                "        self.leave(sequence)\n",
                "`seated` and places never fall: in the end nobody runs",
                "test/engine/test_scheduler.py::test_a_freed_seat_is_taken_in_the_next_step",
            ),
            (
                "        self._running.pop(sequence, None)\n",
                "",
                "an ended row stays in the steps",
                "test/engine/test_fairness.py::test_whatever_comes_and_goes[0]",
            ),
            (
                "        self._reading.pop(sequence, None)\n        for group",
                "        for group",
                "an ended prompt goes on",
                "test/engine/test_fairness.py::test_whatever_comes_and_goes[0]",
            ),
            (
                "        for group in self._groups:\n            group.pop(sequence, None)\n",
                "",
                "an ended row decodes on",
                "test/engine/test_fairness.py::test_interactive_rows_displace_batch_rows_down_to_a_quarter[1]",
            ),
            (
                'rows.sort(key=attrgetter("first_slot"))',
                'rows.sort(key=attrgetter("first_slot"), reverse=True)',
                "rows of a step are read from memory in the wrong order",
                "test/engine/test_scheduler.py::test_rows_decode_in_the_order_of_their_slots",
            ),
            (
                "kept = min(wanted, self._batch_share.prompt_tokens(budget // BATCH_PART))",
                "kept = 0",
                "batch prompts starve beside interactive ones",
                "test/engine/test_fairness.py::test_prompts_of_interactive_rows_are_read_first_and_batch_prompts_get_a_quarter",
            ),
            (
                "self._reads_on = len(chunks) < len(reading)",
                "self._reads_on = False",
                "prompts left over wait for their group's turn",
                "test/engine/test_scheduler.py::test_prompts_left_over_do_not_wait_for_their_groups_turn",
            ),
            (
                "if self._reading and (is_due or self._reads_on or len(rows) <= limits.mixed_rows):",
                "if self._reading and not rows:",
                "prompts wait until nobody decodes",
                "test/engine/test_scheduler.py::test_fewer_prompt_tokens_are_read_while_rows_decode",
            ),
            (
                "        if sequence.lacks_spare_slot:\n",
                "        if False:\n",
                "a row admitted without a spare decodes every second step for ever",
                "test/engine/test_session_slots.py::test_a_row_without_its_second_slot_does_not_run_ahead",
            ),
            (
                "not (s.members or s.scored)",
                "not s.members",
                "scores of a prompt are told in another order than its tokens have",
                "test/engine/test_let_in.py::test_a_scored_prompt_is_not_let_in",
            ),
        ],
        ci=(8,),
    ),
    *of(
        "rwkv_batch/core/limits.py",
        SCHEDULER,
        [
            (
                "return 2 * self.reading_for_several if self.max_running >= 8 else 1",
                "return 2 * self.reading_for_several",
                "with few places shared prompts and waiting turns hold all slots: nobody goes on",
                "test/engine/test_fairness.py::test_waiting_turns_and_prompts_for_several_leave_a_slot_to_go_on_with[1]",
            ),
            (
                "return min(max(1, self.max_running // 16), self.max_running - 1)",
                "return 0",
                "no place is kept for an interactive request",
                "test/engine/test_scheduler.py::test_jobs_share_free_seats_evenly",
            ),
            (
                "return self.max_waiting_rows_per_client or max(1, self.max_waiting_rows * 3 // 4)",
                "return self.max_waiting_rows",
                "by default one client may fill the queue",
                "test/engine/test_giving_way.py::test_a_client_has_a_queue_place_of_its_own",
            ),
        ],
    ),
    *of(
        "rwkv_batch/core/admission.py",
        SCHEDULER,
        [
            (
                "self._fill(self.batch, limits.max_running, limits.reserved_places)",
                "self._fill(self.batch, limits.max_running, 0)",
                "batch rows take the reserved places",
                "test/engine/test_scheduler.py::test_jobs_share_free_seats_evenly",
            ),
            (
                "        self._fill(self.batch, self._batch_places, 0)\n",
                "",
                "batch rows starve",
                "test/engine/test_fairness.py::test_batch_work_that_comes_into_a_flood_begins",
            ),
            (
                "            self._lend()\n",
                "            pass\n",
                "with one place batch rows starve",
                "test/engine/test_fairness.py::test_the_only_place_is_lent_to_batch_work_for_a_while",
            ),
            (
                "self._lent_steps = max(0, self._lent_steps - 1)",
                "pass",
                "with one place a batch row never gives it back",
                "test/engine/test_fairness.py::test_the_only_place_is_lent_to_batch_work_for_a_while",
            ),
            (
                "        self._displace()\n",
                "",
                "an interactive request waits for a bulk job's rows to end",
                "test/engine/test_fairness.py::test_interactive_rows_displace_batch_rows_down_to_a_quarter[1]",
            ),
            (
                "if job.seated and not beside_others and not job.is_batch:",
                "if False:",
                "one job's rows take the last places",
                "test/engine/test_scheduler.py::test_a_freed_seat_is_taken_in_the_next_step",
            ),
            (
                "return reading < limits.reading_for_several and held < limits.prompts_for_several",
                "return True",
                "shared prompts hold all slots: nobody goes on",
                "test/engine/test_scheduler.py::test_prompts_read_for_several_rows_never_hold_all_seats",
            ),
            (
                "if self._slots.is_ready(sequence) and (sequence.draws",
                "if (sequence.draws",
                "a row starts before its session's state is there",
                "test/engine/test_scheduler.py::test_rows_behind_a_busy_session_let_others_pass",
            ),
            (
                "if largest is None or len(largest.running) < len(newcomer.running) + 2:",
                "if largest is None or len(largest.running) < len(newcomer.running):",
                "two clients displace each other for ever",
                "test/engine/test_fairness.py::test_clients_share_the_places",
            ),
            (
                "while turns and self.paused_rows < self._limits.max_paused:",
                "while turns:",
                "more rows give way than there are seats",
                "test/engine/test_fairness.py::test_interactive_rows_displace_batch_rows_down_to_a_quarter[1]",
            ),
            (
                "            self.free_seats.append(sequence.seat)\n",
                "",
                "seats run out",
                "test/engine/test_fairness.py::test_interactive_floods_leave_batch_work_its_part",
            ),
            (
                "next((s for s in reversed(client.running) if s.draws), None)",
                "next((s for s in client.running if s.draws), None)",
                "the oldest row gives way instead of the youngest",
                "test/engine/test_fairness.py::test_paused_rows_keep_slot_and_seat_and_go_on_first",
            ),
            (
                "                    self._steps.leave(victim)\n",
                "",
                "a row that gave way stays in the steps",
                "test/engine/test_fairness.py::test_interactive_rows_displace_batch_rows_down_to_a_quarter[1]",
            ),
            (
                "                self._steps.enter(sequence)  # it was paused",
                "                pass",
                "a turn that ends while paused is never stored",
                "test/engine/test_row_ends.py::test_a_turn_that_ends_while_it_gives_way_is_read_to_its_end",
            ),
            (
                "self._seat(queue.start(job, index), slot)",
                "self._seat(queue.start(job, 0), slot)",
                "a row behind a busy session starts in another's place",
                "test/engine/test_scheduler.py::test_rows_behind_a_busy_session_let_others_pass",
            ),
        ],
        ci=(0, 4),
    ),
    *of(
        "rwkv_batch/core/fair_queue.py",
        SCHEDULER,
        [
            (
                "self._heap = [(len(rows.running), rows.served,",
                "self._heap = [(0, rows.served,",
                "a client with many rows gets as many more",
                "test/engine/test_fairness.py::test_a_client_of_many_jobs_gets_no_more_than_one_of_few",
            ),
            (
                "        if job.waiting:\n            rows.jobs.append(job)\n",
                "        if job.waiting:\n            rows.jobs.appendleft(job)\n",
                "a client's jobs do not take turns",
            ),
            (
                "        for sequence in sequences:\n            self._no_longer_forked(self.of(job.client), sequence)\n",
                "",
                "cancelled forked rows stay queued: no prompt is read for several any more",
                "test/engine/test_fairness.py::test_queued_continuations_of_a_cancelled_job_are_forgotten",
            ),
            (
                "        self.num_waiting -= len(sequences)\n",
                "",
                "cancelled rows count as waiting until the queue is full",
                "test/engine/test_scheduler.py::test_forgetting_a_job_empties_the_queue",
            ),
            (
                "        sequence.job.seated -= 1\n\n    def end",
                "\n    def end",
                "`seated` does not fall when a row gives way",
                "test/engine/test_fairness.py::test_whatever_comes_and_goes[0]",
            ),
            (
                "            self.num_running -= 1\n            sequence.job.seated -= 1\n",
                "            self.num_running -= 1\n",
                "`seated` never falls",
                "test/engine/test_fairness.py::test_a_job_without_seats_may_take_the_reserve_again",
            ),
            (
                "        rows.jobs.appendleft(job)\n        job.waiting.extendleft(reversed(sequences))",
                "        rows.jobs.append(job)\n        job.waiting.extend(sequences)",
                "rows that share a prompt wait behind all others while its slot is held",
                "test/engine/test_scheduler.py::test_continuations_go_first",
            ),
            (
                "            del self._clients[client]\n",
                "            pass\n",
                "clients that were here once are kept for ever",
                "test/engine/test_fairness.py::test_whatever_comes_and_goes[0]",
            ),
            (
                "        rows.served = next(self._serial)\n",
                "",
                "turns go by name",
                "test/engine/test_fairness.py::test_of_clients_with_equally_many_rows_the_one_served_longest_ago_is_next",
            ),
        ],
    ),
    *of(
        "rwkv_batch/core/prompt_turns.py",
        SCHEDULER,
        [
            (
                "    queues.rotate(-turn)\n",
                "",
                "one client's prompts always go first",
                "test/engine/test_fairness.py::test_prompt_tokens_are_shared_evenly_over_time",
            ),
            (
                "count = min(chunk(sequence), share, left)",
                "count = min(chunk(sequence), left)",
                "one job's prompts use its client's whole part",
                "test/engine/test_fairness.py::test_prompt_tokens_are_shared_evenly_over_time",
            ),
            (
                "left = min(budget, max(part, share))",
                "left = budget",
                "one client's prompts use the whole step",
                "test/engine/test_fairness.py::test_prompt_tokens_are_shared_evenly_over_time",
            ),
            (
                "    lines.rotate(-turn)\n",
                "",
                "one job's prompts always go first",
                "test/engine/test_scheduler.py::test_long_prompts_take_turns",
            ),
        ],
    ),
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
                "request.num_rows > 1 and len(request.prompt) > 1",
                "False",
                "every answer of n reads the prompt again",
                "test/engine/test_row_ends.py::test_a_shared_prompt_that_is_cancelled_ends_all_the_rows_it_stands_for",
            ),
            (
                "            done = job.unfinished == 0\n",
                "            done = bool(job.deltas)\n",
                "the first news of a job is its last",
            ),
            (
                "            number += request.num_rows\n",
                "            number += 1\n",
                "rows of n > 1 bear other rows' numbers",
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
    *of(
        "rwkv_batch/core/output.py",
        OUTPUT,
        [
            (
                "            self._end = logprob\n        self._release(len(self._tail))\n",
                "            self._end = logprob\n",
                "held text is lost at a stop id",
                "test/engine/test_output.py::test_text_that_is_held_is_shown_with_the_token_that_ends_the_row",
            ),
            (
                "        if found is not None:\n            length",
                "        if found is not None and len(tokens) < self._max_tokens:\n            length",
                "the length is judged before a stop that the last allowed token completes",
                "test/engine/test_output.py::test_a_stop_that_the_last_allowed_token_completes_is_a_stop",
            ),
            (
                "        self._release(len(self._tail) - node.depth)\n",
                "        self._release(len(self._tail))\n",
                "the beginning of a stop is shown",
                "test/engine/test_output.py::test_stop_string_across_tokens",
            ),
            (
                "self._release(len(self._tail) - (length - self._cut))",
                "self._release(len(self._tail))",
                "a stop is shown",
            ),
            (
                "if len(tokens) >= self._max_tokens:",
                "if len(tokens) > self._max_tokens:",
                "one token too many",
            ),
            (
                "            self._release(len(self._tail))\n            return FinishReason.LENGTH",
                "            return FinishReason.LENGTH",
                "held text is kept in the session and shown late at the limit",
                "test/engine/test_output.py::test_text_that_is_held_is_shown_with_the_token_that_ends_the_row",
            ),
            (
                "whole = bisect_right(self._ends, self._cut)",
                "whole = len(self.tokens) - 1",
                "tokens of the stop stay in the session",
            ),
            (
                "return self.tokens[:whole], partial",
                'return self.tokens[:whole], b""',
                "the shown part of a cut token is forgotten",
            ),
            (
                "        self._gathered = 0\n        return Delta(self.row, text, gathered, finish",
                "        return Delta(self.row, text, gathered, finish",
                "token counts of deltas add up to too much",
            ),
            (
                'else b"".join(ready)\n        ready.clear()\n',
                'else b"".join(ready)\n',
                "text is sent again and again",
            ),
            (
                "begun = [entry for entry in self._logprobs if entry[0] < shown]",
                "begun = list(self._logprobs)",
                "log-probabilities of a stop are shown",
            ),
            (
                "return chunk if request.sampling.top_logprobs is None else min(chunk, LOGPROBS_CHUNK)",
                "return chunk",
                "log-probabilities of a whole answer are gathered in the engine",
            ),
            (
                "self._cut = length - len(text) + found",
                "self._cut = length - len(text) + max(0, found)",
                "a stop that began in an earlier token is shown in part",
            ),
            (
                "or len(tokens) + 1 >= self._max_tokens\n",
                "",
                "a row of plain text has no last token",
                "test/engine/test_output.py::test_what_is_taken_is_what_is_pushed_and_then_worth_sending",
            ),
            (
                "(self._tail or self._node.depth or text.translate(None, self._firsts) != text)",
                "text.translate(None, self._firsts) != text",
                "text overtakes what is held back before it",
                "test/engine/test_output.py::test_what_is_taken_is_what_is_pushed_and_then_worth_sending",
            ),
        ],
        ci=(1, 2),
    ),
    *of(
        "rwkv_batch/core/stops.py",
        OUTPUT,
        [
            (
                'if len(byte_table[i]) > 1 and not byte_table[i].strip(b"\\n")',
                'if not byte_table[i].strip(b"\\n")',
                "a single-newline stop id cuts merged tokens",
            ),
            (
                "self.automaton = StopAutomaton(blank | set(request.stop_strings))",
                "self.automaton = StopAutomaton(blank or set(request.stop_strings))",
                "a stop string is lost beside a blank-line stop id",
                "test/engine/test_output.py::test_a_stop_string_beside_a_blank_line_stop_id",
            ),
            ("            ids.discard(END_OF_TEXT)\n", "            pass\n", "ignore_eos does not"),
            ("            ids.add(END_OF_TEXT)\n", "            pass\n", "the end of the text is shown as text"),
            (
                "fallback = self.root if parent is self.root else self._step(self._fallbacks[parent], byte)",
                "fallback = self.root",
                "a stop inside the failed beginning of another is missed",
            ),
            (
                "        child.longest = child.longest or fallback.longest\n",
                "",
                "a stop at the end of another's beginning is missed",
            ),
            (
                "if node.longest and (found is None or end - node.longest < found):",
                "if node.longest:",
                "the last of several stops counts instead of the first",
            ),
            (
                "key = (request.ignore_eos, frozenset(request.stop_ids), frozenset(request.stop_strings))",
                "key = (request.ignore_eos, frozenset(request.stop_ids))",
                "rows share the stop strings of others",
            ),
        ],
        ci=(1,),
    ),
    *of(
        "rwkv_batch/core/let_in.py",
        ("test/engine/test_let_in.py",),
        [
            ("            self._left -= 1\n", "", "batch work stands still for as long as requests come"),
            (
                "self._under_way = frozenset(row.sequence.job for row in rows)",
                "self._under_way = frozenset()",
                "a job that fails within a step frees slots to which the rest of it writes",
                "test/engine/test_let_in.py::test_no_job_is_let_into_a_step_that_has_rows_of_it",
            ),
            (
                "        self._looks = bool(rows)\n",
                "",
                "a long prompt that was let in once waits for the end of the step",
            ),
            (
                "        self.end()  # the piece",
                "        # the piece",
                "what was let in is told when the step around it is launched",
            ),
        ],
    ),
    *of(
        "rwkv_batch/core/throughput.py",
        ("test/engine/test_throughput.py", "test/engine/test_engine_parts.py"),
        [
            (
                "        self.generated_tokens += generated\n",
                "        self.generated_tokens += len(rows)\n",
                "rows that only read count as drawn tokens",
            ),
            (
                "self.busy_s += now - max(started, self._last_end)",
                "self.busy_s += now - started",
                "time that two steps share counts twice",
            ),
            (
                "self._window = [entry for entry in self._window if now - entry[0] < WINDOW_S]",
                "self._window = list(self._window)",
                "the window of rates grows for ever",
            ),
        ],
    ),
]
