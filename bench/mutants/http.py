"""Mutants of the HTTP workers, what they read, answer and are told, and of the processes around them."""

from __future__ import annotations

from bench.mutants.mutant import Mutant, of

HANDLERS = "test/routes/test_handlers.py"
BODIES = (
    "test/routes/test_body_limits.py",
    "test/routes/test_http_input.py",
    "test/routes/test_routes_batch.py",
    "test/routes/test_openai_routes.py",
    "test/routes/test_openai_refusals.py",
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
                "        if not is_known and error.info.kind is not ErrorKind.BODY_TOO_LARGE:\n            raise",
                "        if False:\n            raise",
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
                "got {worded(given)}",
                "got {given}",
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
        "routes/model_directory.py",
        ("test/routes/test_model_replacement.py",),
        [
            (
                "            if self._answered > came:\n                return\n",
                "",
                "each who asks for a model that is being loaded puts a question of his own",
                "test/routes/test_model_replacement.py::test_many_who_want_a_model_that_is_being_loaded_are_told_as_soon_as_that_is_known",
            ),
        ],
    ),
    *of(
        "routes/request/unserved.py",
        BODIES,
        [
            (
                "_refusing(_NO_SEARCH, lambda value: value not in (None, False))",
                "refusing(_NO_SEARCH)",
                "an answer that was to search the web is made without",
                "test/routes/test_body_limits.py::test_what_no_answer_here_can_heed_is_refused_by_name",
            ),
        ],
    ),
    *of(
        "native/temporary_folder.py",
        ("test/supervisor/test_left_folders.py",),
        [
            (
                "        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
                "",
                "a service that starts removes the folders of those that run",
                "test/supervisor/test_left_folders.py::test_only_those_without_an_owner_are_removed",
            ),
            (
                "            if os.fstat(self._lock).st_nlink:\n",
                "            if True:\n",
                "a service has a folder that another one has just removed",
                "test/supervisor/test_left_folders.py::test_one_that_is_removed_before_it_is_locked_is_made_again",
            ),
        ],
    ),
]
