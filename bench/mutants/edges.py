"""Mutants of the samplers, the HTTP workers and the socket between the processes."""

from __future__ import annotations

from bench.mutants.mutant import Mutant, of

LINKS = "test/engine/test_engine_links.py"
HANDLERS = "test/routes/test_handlers.py"
SAMPLING = ("test/sampling/test_sampling.py", "test/sampling/test_sampling_parts.py")
WIRE = ("test/engine/test_wire.py", "test/engine/test_calls.py")
BODIES = (
    "test/routes/test_body_limits.py",
    "test/routes/test_http_input.py",
    "test/routes/test_routes_batch.py",
    "test/routes/test_openai_routes.py",
    "test/routes/test_routes_sessions.py",
)
HTTP = (
    "test/routes/test_http_auth.py",
    "test/routes/test_http_input.py",
    "test/routes/test_http_routes.py",
    "test/routes/test_http_faults.py",
)
TOOLS = ("test/routes/test_tools.py", "test/routes/test_tool_constraints.py")
ANSWERS = ("test/routes/test_routes_answers.py", "test/routes/test_http_routes.py", "test/routes/test_http_faults.py")

MUTANTS: list[Mutant] = [
    *of(
        "sampling/naive.py",
        SAMPLING,
        [
            (
                "    mass = ((values * scale) - largest.unsqueeze(1) * scale).exp_().double()\n",
                "    mass = ((values * scale) - largest.unsqueeze(1) * scale).exp_()\n",
                "masses are summed in fp32",
                "test/sampling/test_sampling_parts.py::test_masses_are_summed_in_fp64",
            ),
            (
                "    before = mass.cumsum(dim=1).sub_(mass)\n",
                "    before = mass.cumsum(dim=1)\n",
                "the token that crosses top_p is left out",
                "test/sampling/test_sampling.py::test_kept_tokens_are_all_drawn_and_no_others[naive]",
            ),
            ("    kept[:, 0] = True\n", "", "a tiny top_p leaves no token"),
            (
                'return tokens.masked_fill_(largest == -float("inf"), 0)',
                "return tokens",
                "a row of NaN draws no token id",
                "test/sampling/test_sampling.py::test_nan_and_infinite_logits_harm_no_other_row",
            ),
            (
                "ids.masked_fill(score != best, torch.iinfo(torch.int64).max).amin(dim=1)",
                "ids.masked_fill(score != best, -1).amax(dim=1)",
                "of equal tokens the higher id is drawn",
                "test/sampling/test_sampling.py::test_of_equal_scores_the_lower_id_is_drawn[naive]",
            ),
            (
                '    undecided = ((last <= values[:, -1:]) & (last > -float("inf"))).flatten()\n',
                "    undecided = torch.zeros(len(values), dtype=torch.bool)\n",
                "flat distributions are cut short",
            ),
            (
                "        self.table.advance(plan.seats)\n",
                "",
                "every token is drawn with the same random number",
                "test/sampling/test_sampling.py::test_steps_and_seeds_decide",
            ),
            (
                "nan=-infinity, posinf=MAX_LOGIT",
                "nan=MAX_LOGIT, posinf=MAX_LOGIT",
                "a NaN wins",
                "test/sampling/test_sampling.py::test_nan_and_infinite_logits_harm_no_other_row",
            ),
            (
                "            self._plan, self._plan_for = make_plan(self.table, seats), asked\n",
                "            self._plan, self._plan_for = self._plan or make_plan(self.table, seats), asked\n",
                "new rows draw with the parameters of those before",
            ),
        ],
        ci=(1,),
    ),
    *of(
        "sampling/seats.py",
        SAMPLING,
        [
            (
                "        self.steps[seat] = 0\n",
                "",
                "a seed draws differently in a seat used before",
                "test/sampling/test_sampling.py::test_a_row_that_moves_in_forgets_the_last_one",
            ),
            (
                "        self.num_seen[seat] = 0\n",
                "",
                "a new row is punished for another's tokens",
                "test/sampling/test_sampling.py::test_a_row_that_moves_in_forgets_the_last_one",
            ),
            (
                "        counts = self.seen_counts[seats, :width] * alphas[:, 2:3]\n",
                "        counts = self.seen_counts[seats, :width].clone()\n",
                "penalty_decay does nothing",
                "test/sampling/test_sampling.py::test_penalties_step_by_step",
            ),
            (
                "(here & ~self.penalty_exempt[tokens].unsqueeze(1))",
                "here",
                "digits and spaces are punished",
                "test/sampling/test_sampling.py::test_penalties_step_by_step",
            ),
            (
                "        counts = counts.masked_fill_(fresh, 0.0)",
                "        counts = counts",
                "what the last row in a seat drew counts for the next",
                "test/sampling/test_sampling.py::test_a_new_rows_counts_begin_at_zero[naive]",
            ),
            (
                "penalty = self.seen_counts[seats, :width] * alphas[:, 1:2] + alphas[:, 0:1]",
                "penalty = self.seen_counts[seats, :width] * (alphas[:, 1:2] + alphas[:, 0:1])",
                "the presence penalty grows with the count",
                "test/sampling/test_sampling.py::test_penalties_step_by_step",
            ),
            ("        self.version += 1\n", "", "plans outlive the rows they were made for"),
        ],
    ),
    *of(
        "sampling/cpu.py",
        SAMPLING,
        [
            (
                "top_k=params.top_k if 0 < params.top_k < vocab else vocab",
                "top_k=params.top_k",
                "top_k 0 keeps nothing",
            ),
            (
                "    if params.method is Method.NOISE:\n        return NOISE\n",
                "",
                "/v2 draws as /v1",
                "test/sampling/test_sampling.py::test_noise",
            ),
            (
                "    if is_greedy(params):\n        return GREEDY\n",
                "",
                "temperature 0 is not greedy",
                "test/sampling/test_sampling.py::test_greedy_rows_take_the_lowest_of_equal_tokens",
            ),
            (
                "seed=params.seed & 0xFFFFFFFFFFFFFFFF",
                "seed=params.seed & 0xFFFFFFFF",
                "seeds above 32 bits draw alike",
            ),
            (
                "        before = raw_logprobs(logits, asked)\n        tokens = torch.empty(rows, dtype=torch.int64)\n",
                "        tokens = torch.empty(rows, dtype=torch.int64)\n        before = raw_logprobs(logits[:, :1].expand_as(logits), asked)\n",
                "log-probabilities are of other tokens",
                "test/sampling/test_sampling.py::test_logprobs_are_of_the_raw_distribution[cpu]",
            ),
        ],
        ci=(4,),
    ),
    *of(
        "sampling/csrc/sampler.cpp",
        SAMPLING,
        [
            (
                "if (p.top_p < 1) limits.enough = p.top_p * total_mass(row);",
                "if (p.top_p < 1) limits.enough = static_cast<float>(p.top_p * total_mass(row)) * 0.999f;",
                "masses are compared in fp32",
                "test/sampling/test_sampling.py::test_a_token_just_below_top_p_is_kept[cpu]",
            ),
            (
                "    seat.counts[i] *= seat.parameters.decay;\n",
                "",
                "penalty_decay does nothing on a CPU",
                "test/sampling/test_sampling.py::test_penalties_step_by_step",
            ),
            (
                "  if (!penalty_exempt[token]) seat.counts[at] += 1.0f;",
                "  seat.counts[at] += 1.0f;",
                "digits and spaces are punished on a CPU",
                "test/sampling/test_sampling.py::test_penalties_step_by_step",
            ),
            (
                "  taken.seen.clear();\n  taken.counts.clear();\n",
                "",
                "a new row is punished for another's tokens on a CPU",
                "test/sampling/test_sampling.py::test_a_row_that_moves_in_forgets_the_last_one",
            ),
        ],
    ),
    *of(
        "rwkv_batch/ipc/wire.py",
        WIRE,
        [
            (
                "            if not self._waiting:\n                frame = frame[self._send_now(frame) :]\n",
                "            frame = frame[self._send_now(frame) :]\n",
                "news overtake each other to a worker that lags",
                "test/engine/test_wire.py::test_what_is_sent_to_a_peer_that_lags_overtakes_nothing",
            ),
            (
                "        if len(self._waiting) > MAX_WAITING_FRAMES or self._waiting_bytes > MAX_WAITING_BYTES:\n",
                "        if False:\n",
                "a worker that hangs fills the engine's memory",
                "test/engine/test_wire.py::test_a_peer_that_reads_nothing_is_cut_off",
            ),
            (
                "                    self._waiting.popleft()\n                    self._waiting_bytes -= len(frame)\n",
                "                    self._waiting.popleft()\n",
                "a worker that once lagged is cut off later",
                "test/engine/test_wire.py::test_who_has_caught_up_may_lag_again",
            ),
            (
                "            if not count:\n                return None\n",
                "            if not count:\n                return body\n",
                "half a frame is read as one",
            ),
            (
                "            if size and size + more > frame_bytes:\n",
                "            if False:\n",
                "a long answer is one frame that cuts the worker off",
                "test/engine/test_wire.py::test_news_of_a_step_go_in_frames_of_bounded_size",
            ),
            (
                "rest = event if first == 0 else msgspec.structs.replace(event, deltas=event.deltas[first:])",
                "rest = event",
                "deltas at the border of a frame come twice",
                "test/engine/test_wire.py::test_news_of_a_step_go_in_frames_of_bounded_size",
            ),
        ],
    ),
    *of(
        "rwkv_batch/ipc/client.py",
        (*WIRE, "test/routes/test_http_faults.py", "test/routes/test_http_lifecycle.py"),
        [
            (
                "            tell.append(partial(listener.sink, JobEvents(job_id=job_id, deltas=[], done=True, error=error)))\n",
                "",
                "who waits when the engine dies waits for ever",
                f"{LINKS}::test_whoever_waits_when_the_engine_is_lost_is_told_once",
            ),
            (
                "        tell.extend(partial(asked.reply, ServiceError.from_info(lost)) for asked in waiting.calls.values())\n",
                "",
                "a call that waits when the engine dies is never answered",
                f"{LINKS}::test_whoever_waits_when_the_engine_is_lost_is_told_once",
            ),
            (
                "            error = lost_turn if listener.is_turn else lost\n",
                "            error = lost\n",
                "a turn that may be kept is told to be sent again",
                f"{LINKS}::test_whoever_waits_when_the_engine_is_lost_is_told_once",
            ),
            (
                "                if error is not None:\n                    self._waiting.listeners.pop(job_id, None)\n",
                "",
                "refused jobs are kept for ever",
                f"{LINKS}::test_jobs_that_were_refused_or_have_ended_are_forgotten",
            ),
            (
                "            waiting, self._waiting = self._waiting, _Waiting()\n",
                "            waiting = self._waiting\n",
                "jobs of a dead engine are told of twice",
                f"{LINKS}::test_whoever_waits_when_the_engine_is_lost_is_told_once",
            ),
            (
                "pop = self._waiting.listeners.pop if events.done else self._waiting.listeners.get",
                "pop = self._waiting.listeners.get",
                "jobs that have ended are kept for ever",
                f"{LINKS}::test_jobs_that_were_refused_or_have_ended_are_forgotten",
            ),
            (
                "= [partial(self._on_change, False)]\n",
                "= []\n",
                "/readyz says ready without an engine",
                f"{LINKS}::test_whoever_waits_when_the_engine_is_lost_is_told_once",
            ),
        ],
    ),
    *of(
        "rwkv_batch/ipc/server.py",
        (*WIRE, "test/engine/test_threads.py", "test/routes/test_http_faults.py", "test/routes/test_http_lifecycle.py"),
        [
            (
                "            for job_id in list(self.jobs):\n",
                "            for job_id in ():\n",
                "jobs of a dead worker run on",
                f"{LINKS}::test_a_worker_that_is_gone_leaves_nothing_behind",
            ),
            (
                "            self._peers.discard(peer)\n",
                "            pass\n",
                "dead workers are kept for ever",
                f"{LINKS}::test_a_worker_that_is_gone_leaves_nothing_behind",
            ),
            (
                "        if events.done:\n            self.jobs.discard(events.job_id)\n",
                "",
                "ended jobs are kept for ever",
                f"{LINKS}::test_a_worker_that_is_gone_leaves_nothing_behind",
            ),
        ],
    ),
    *of(
        "routes/serving/http.py",
        HTTP,
        [
            (
                "        self._context.gate.leave(self._client)\n",
                "",
                "places run out",
                "test/routes/test_http_faults.py::test_whole_answers_and_refusals_give_their_places_back",
            ),
            (
                "        visit.leave()\n",
                "",
                "the gate is not left after whole answers",
                "test/routes/test_http_faults.py::test_whole_answers_and_refusals_give_their_places_back",
            ),
            (
                "        self._chunks.close()\n",
                "",
                "a client that left keeps its row running",
                f"{HANDLERS}::test_a_client_that_has_left_ends_the_work_behind_its_answer",
            ),
            (
                "    if max(length, len(body)) > limit:\n",
                "    if False:\n",
                "a body of any size is parsed",
                "test/routes/test_http_faults.py::test_the_body_limit_is_a_flag",
            ),
            (
                "    if len(body) < length:\n        raise",
                "    if False:\n        raise",
                "half a body is taken for a whole one",
                "test/routes/test_http_input.py::test_half_a_body_is_400",
            ),
            (
                "        if is_known or error.info.kind is ErrorKind.BODY_TOO_LARGE:\n            raise\n",
                "        raise\n",
                "a stranger learns what is wrong with a body",
                "test/routes/test_http_auth.py::test_the_password_comes_before_validation",
            ),
            (
                "        if chunk not in _SIGNS_OF_LIFE:\n            exchange.wrote()\n",
                "        exchange.wrote()\n",
                "the time to the first byte ends with a heartbeat",
                f"{HANDLERS}::test_the_first_byte_is_one_of_the_answer",
            ),
            (
                "    if route.is_work:\n        context.gate.check_draining()\n",
                "",
                "work is taken while the service ends",
                f"{HANDLERS}::test_work_that_waited_for_the_engine_until_the_service_ends_is_refused",
            ),
            (
                '    answer.headers["Allow"] = allowed\n',
                "",
                "405 does not say what is allowed",
                "test/routes/test_http_input.py::test_unknown_paths_and_wrong_methods",
            ),
        ],
        ci=(0,),
    ),
    *of(
        "routes/dispatch.py",
        HTTP,
        [
            (
                "    except Exception:  # a fault of ours is a 500",
                "    except ZeroDivisionError:  # a fault of ours is a 500",
                "a fault of a route is no JSON",
                f"{HANDLERS}::test_a_fault_of_ours_is_a_500_in_the_routes_form",
            ),
        ],
    ),
    *of(
        "routes/serving/auth.py",
        HTTP,
        [
            (
                "_same(_decoded(secret, wanted, is_header), wanted)",
                "True",
                "any password is right",
                "test/routes/test_http_auth.py::test_a_wrong_password_is_401",
            ),
            (
                '    if scheme.lower() != "bearer":\n        return None\n',
                "",
                "a password in another scheme is taken",
                f"{HANDLERS}::test_a_bearer_alone_is_taken_from_the_header",
            ),
        ],
    ),
    *of(
        "routes/request/fields.py",
        BODIES,
        [
            (
                'strict=True, extra="ignore", allow_inf_nan=False',
                'extra="ignore", allow_inf_nan=False',
                '"5" is taken for 5',
                "test/routes/test_http_input.py::test_a_wrong_field_is_named_with_its_value",
            ),
        ],
    ),
    *of(
        "routes/request/bodies.py",
        BODIES,
        [
            (
                "    wait: bool = Field(True, ",
                "    wait: bool = Field(False, ",
                "`wait` is false by default",
                "test/routes/test_body_limits.py::test_bodies_are_bounded_and_say_one_thing[body0-seed]",
            ),
            (
                '        "rwkv7",\n        max_length=256,\n        description="Repeated in the answer; ',
                '        "rwkv7",\n        description="Repeated in the answer; ',
                "`model` is unbounded",
                "test/routes/test_body_limits.py::test_names_and_penalties_have_limits",
            ),
            (
                "alpha_presence: float = Field(2.0, ge=-100, le=100, ",
                "alpha_presence: float = Field(2.0, ",
                "penalties are unbounded",
                "test/routes/test_body_limits.py::test_names_and_penalties_have_limits",
            ),
            (
                "alpha_frequency: float = Field(0.2, ge=-100, le=100, ",
                "alpha_frequency: float = Field(0.2, ge=-100, ",
                "the frequency penalty has no upper bound",
                "test/routes/test_body_limits.py::test_names_and_penalties_have_limits",
            ),
            (
                'got {shown(given)}")\n        raise',
                'got {given}")\n        raise',
                "errors echo whole values",
                "test/routes/test_body_limits.py::test_errors_do_not_repeat_whole_values",
            ),
            (
                "field=location, given=shown(given))",
                "field=location, given=given)",
                "errors carry whole values",
                "test/routes/test_body_limits.py::test_errors_do_not_repeat_whole_values",
            ),
            (
                "seed: int | None = Field(\n        None, ge=0, lt=2**64",
                "seed: int | None = Field(\n        None, ge=0",
                "a seed beyond 64 bits reaches the engine",
                "test/routes/test_body_limits.py::test_bodies_are_bounded_and_say_one_thing[body0-seed]",
            ),
            (
                "StopTokens = Annotated[list[StopToken], Field(max_length=64, fail_fast=True)]",
                "StopTokens = Annotated[list[StopToken], Field(fail_fast=True)]",
                "any number of stops",
                "test/routes/test_body_limits.py::test_bodies_are_bounded_and_say_one_thing[body2-stop_tokens]",
            ),
            (
                "Texts = Annotated[list[str], Field(fail_fast=True)]",
                "Texts = Annotated[list[str], Field()]",
                "a small wrong body exhausts memory",
                "test/routes/test_body_limits.py::test_a_wrong_body_costs_little",
            ),
            (
                "    max_tokens: int = Field(8192, ge=1, ",
                "    max_tokens: int = Field(8192, ",
                "max_tokens 0",
                "test/routes/test_http_input.py::test_a_wrong_field_is_named_with_its_value",
            ),
            (
                "        if len(self.prefixes) != len(self.suffixes):\n",
                "        if False:\n",
                "prefixes without suffixes",
                "test/routes/test_routes_batch.py::test_fim_refuses_gaps_without_two_sides",
            ),
            (
                "    top_p: float = Field(0.6, ge=0, le=1, ",
                "    top_p: float = Field(0.6, ge=0, ",
                "top_p above 1",
                "test/routes/test_http_input.py::test_a_wrong_field_is_named_with_its_value",
            ),
            (
                "        if sum(forms) != 1:\n",
                "        if sum(forms) < 1:\n",
                "contents beside messages are dropped",
                "test/routes/test_body_limits.py::test_bodies_are_bounded_and_say_one_thing",
            ),
        ],
        ci=(1,),
    ),
    *of(
        "routes/response/generate.py",
        ANSWERS,
        [
            (
                "    if len(errors) == num_rows:\n        raise ServiceError.from_info(errors[0])\n",
                "",
                "a failed answer is 200",
                f"{HANDLERS}::test_an_answer_of_which_every_row_failed_is_a_failure[2-409]",
            ),
            (
                "    if transcript.error is not None:\n        raise ServiceError.from_info(transcript.error)\n",
                "",
                "a failed job is an empty answer",
                "test/routes/test_http_faults.py::test_a_job_that_breaks_is_500_when_nothing_was_written",
            ),
            (
                '                chunk += sse(self._dialect.error_form.body(row.finish.error) | {"index": row.row})\n',
                "                pass\n",
                "a row's failure is not told in a stream",
                f"{HANDLERS}::test_a_stream_tells_of_rows_that_failed_and_ends",
            ),
            (
                "        if self._transcript.error is not None:\n            return sse(self._dialect.error_form.body(self._transcript.error)) + DONE\n",
                "",
                "a failed stream ends as if it were whole",
                "test/routes/test_http_faults.py::test_a_job_that_breaks_mid_stream_ends_with_an_error_event",
            ),
            (
                "            return HEARTBEAT\n        updates",
                '            return b""\n        updates',
                "a stream without news is silent: a client that left is not noticed",
                f"{HANDLERS}::test_a_stream_tells_of_rows_that_failed_and_ends",
            ),
            (
                "        if not self._stream.wait_on_thread(PATIENCE_S):\n            return BLANK\n",
                "        while not self._stream.wait_on_thread(PATIENCE_S):\n            pass\n",
                "a client that left keeps its whole answer running",
                f"{HANDLERS}::test_an_answer_that_takes_its_time_shows_whether_its_client_is_there",
            ),
            (
                "            self.ended = True\n            chunk += self._end()\n",
                "            chunk += self._end()\n",
                "a stream does not end",
                f"{HANDLERS}::test_a_stream_tells_of_rows_that_failed_and_ends",
            ),
        ],
    ),
    *of(
        "routes/response/tool_calls.py",
        TOOLS,
        [
            (
                "            self._escaped = self._in_string\n",
                "            pass\n",
                "a quoted quote ends a string",
                "test/routes/test_tools.py::test_calls_are_parted_wherever_the_text_is_cut",
            ),
            (
                "        if self.count and not self._has_said:\n",
                "        if False:\n",
                "white space behind a call is told",
                "test/routes/test_tools.py::test_calls_are_parted_wherever_the_text_is_cut",
            ),
            (
                "        self._place = _Place.HEAD if is_open else _Place.TEXT\n",
                "        self._place = _Place.TEXT\n",
                "a call that the prompt has opened is text",
                "test/routes/test_tools.py::test_an_answer_that_the_prompt_has_opened_as_a_call",
            ),
            (
                "            self._looked = len(self._held)\n            return False\n",
                "            self._looked = len(self._held)\n            return self._is_none() if final else False\n",
                "half a call is text",
                "test/routes/test_tools.py::test_calls_are_parted_wherever_the_text_is_cut",
            ),
        ],
    ),
    *of(
        "routes/request/call_grammar.py",
        TOOLS,
        [
            (
                '        made["additionalProperties"] = False\n',
                "        pass\n",
                "a call may have arguments that nobody knows",
                "test/routes/test_tool_constraints.py::test_arguments_are_those_of_the_schema",
            ),
            (
                " if several else",
                " if True else",
                "parallel_tool_calls: false is several calls",
                "test/routes/test_tool_constraints.py::test_what_an_answer_may_be",
            ),
        ],
    ),
    *of(
        "supervisor/http_workers.py",
        ("test/supervisor/test_http_workers.py",),
        [
            (
                "for worker in self.workers) == self.num_sockets",
                "for worker in self.workers) > 0",
                "/readyz says ready while others refuse work",
                "test/supervisor/test_http_workers.py::test_ready_is_told_when_every_socket_is_served_by_a_worker_that_has_the_engine",
            ),
        ],
    ),
    *of(
        "rwkv_batch/model/state_form.py",
        ("test/model/test_state_form.py",),
        [
            (
                "codes = (steps.add_(chance) >> FRACTION_BITS)",
                "codes = (steps.add_(1 << (FRACTION_BITS - 1)) >> FRACTION_BITS)",
                "states of int8 forget nothing that decays slowly",
                "test/model/test_state_form.py::test_slow_decays_are_kept_in_the_mean",
            ),
            (
                "(largest >= KEEP * old)",
                "(largest > TOP * old)",
                "states of int8 that nothing changes are rounded anew",
                "test/model/test_state_form.py::test_what_does_not_change_stays_bit_for_bit",
            ),
            (
                "pack_int8(states, before)",
                "pack_int8(states.roll(1, 0), before)",
                "a row gets another row's state",
                "test/model/test_state_form.py::test_rows_are_kept_apart",
            ),
        ],
    ),
    *of(
        "rwkv_batch/runner/state_copy.py",
        ("test/engine/test_state_forms.py",),
        [
            (
                "piece = form.pack(wkv[first : first + part.shape[1]])",
                "piece = form.pack(wkv[: part.shape[1]])",
                "later stages begin from the first stage's tuned state",
                "test/engine/test_state_forms.py::test_a_tuned_state_is_packed_into_its_slot",
            ),
        ],
    ),
]
