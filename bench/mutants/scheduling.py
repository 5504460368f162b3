"""Mutants of what decides who runs, and when."""

from __future__ import annotations

from bench.mutants.mutant import Mutant, of

WORLDS = "test/simulation/test_simulation.py"
SCHEDULER = (
    "test/engine/test_scheduler.py",
    "test/engine/test_fairness.py",
    "test/engine/test_prompt_turns.py",
    "test/engine/test_continuations.py",
    f"{WORLDS}::test_worlds[0]",
    "test/engine/test_giving_way.py",
    "test/engine/test_row_ends.py",
    WORLDS,
)

MUTANTS: list[Mutant] = [
    *of(
        "rwkv_batch/core/batch_share.py",
        ("test/engine/test_batch_share.py", "test/engine/test_fairness.py", "test/engine/test_prompt_turns.py"),
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
                "test/engine/test_prompt_turns.py::test_prompts_of_interactive_rows_are_read_first_and_batch_prompts_get_a_quarter",
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
                "test/engine/test_continuations.py::test_waiting_turns_and_prompts_for_several_leave_a_slot_to_go_on_with[1]",
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
                "test/engine/test_continuations.py::test_queued_continuations_of_a_cancelled_job_are_forgotten",
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
                "test/engine/test_prompt_turns.py::test_prompt_tokens_are_shared_evenly_over_time",
            ),
            (
                "count = min(chunk(sequence), share, left)",
                "count = min(chunk(sequence), left)",
                "one job's prompts use its client's whole part",
                "test/engine/test_prompt_turns.py::test_prompt_tokens_are_shared_evenly_over_time",
            ),
            (
                "left = min(budget, max(part, share))",
                "left = budget",
                "one client's prompts use the whole step",
                "test/engine/test_prompt_turns.py::test_prompt_tokens_are_shared_evenly_over_time",
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
    *of(
        "rwkv_batch/engine.py",
        ("test/engine/test_engine.py",),
        [
            (
                "            self._let_in.rest()\n",
                "            pass\n",
                "the prompts of the last batch stay in memory for as long as nobody comes",
                "test/engine/test_engine.py::test_nothing_is_kept_of_the_last_step_with_batch_work",
            ),
        ],
    ),
]
