"""The batched engine: one thread that owns the model, the scheduler, the samplers and the state pool.

Callers on any thread put commands into an inbox. Answers leave through callbacks on the engine's thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from rwkv_batch import calls
from rwkv_batch.config import EngineConfig
from rwkv_batch.core.error_mapping import (
    SHUTDOWN_ERROR,
    describe_error,
    draining_error,
    engine_lost_error,
    out_of_memory_error,
)
from rwkv_batch.core.grammar_compile_queue import GrammarCompileQueue, Grammars
from rwkv_batch.core.job_table import JobTable
from rwkv_batch.core.prefill_interleaver import BetweenPieces, PrefillInterleaver
from rwkv_batch.core.scheduler import ScheduledRow, Scheduler
from rwkv_batch.core.session_transfer import SessionTransfer
from rwkv_batch.core.speculation import Speculation
from rwkv_batch.core.state_manager import StateManager
from rwkv_batch.core.throughput import Throughput
from rwkv_batch.engine_calls import EngineCalls, UserFiles, reply_with
from rwkv_batch.errors import ErrorInfo, ErrorKind, ServiceError
from rwkv_batch.inbox import Inbox
from rwkv_batch.protocol import OnAdmitted, Sink
from rwkv_batch.request import Job, Load
from rwkv_batch.runner.adapter_library import AdapterLibrary
from rwkv_batch.runner.grammar_compiler import make_compiler
from rwkv_batch.runner.model_files import ModelChecks
from rwkv_batch.runner.model_runner import ModelRunner
from rwkv_batch.runner.state_library import StateLibrary
from rwkv_batch.runner.step_sampling import InFlightStep, Step
from sampling.grammar.required_text import RequiredTexts
from state_pool.cache.slots import DraftSlots

logger = logging.getLogger(__name__)

POLL_S, IDLE_POLL_S = 0.002, 0.25
"""Seconds between polls of the pool without running rows: while copies or writes run, and while nothing runs."""


class Engine:
    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._wake = threading.Event()
        self._inbox = Inbox(self._wake)
        self._stopping = self._draining = False
        self._loop_count = self._next_step = 0
        self._fatal_error: ErrorInfo | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loaded = threading.Event()
        self._failure: BaseException | None = None
        self.throughput = Throughput()
        self._in_flight: deque[Step] = deque()
        self._interleaver: PrefillInterleaver[Step] = PrefillInterleaver(
            self._inbox.run_arrivals,
            lambda jobs: self.scheduler.schedule_interactive_prefill(jobs),  # noqa: PLW0108 - there is none yet
            self._launch,
            self._process_outputs,
        )
        self._session_transfer = SessionTransfer(self._inbox.put, self._unavailable_error)
        self._grammar_queue = GrammarCompileQueue(
            lambda: make_compiler(self.model_runner.tokenizer, self.model_runner.vocab, self.model_runner.device),
            lambda: RequiredTexts(self.model_runner.tokenizer, self.model_runner.vocab),
            self._unavailable_error,
        )
        self._user_files = UserFiles(
            StateLibrary(config, self._inbox.put, self._unavailable_error),
            AdapterLibrary(config, self._inbox.put, self._unavailable_error),
            ModelChecks(self._unavailable_error),
        )

    # Start and stop ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Load the model and start serving. Raises StartupError with the cause and the remedy."""
        self._thread.start()
        self._loaded.wait()
        if self._failure is not None:
            raise self._failure

    def drain(self, timeout_s: float) -> None:
        """Refuse new jobs and wait for running ones. `stop` cancels the rest."""
        self._draining = True
        deadline = time.monotonic() + timeout_s
        while self._thread.is_alive() and len(self.jobs) and time.monotonic() < deadline:
            time.sleep(0.01)

    def stop(self) -> None:
        """End the running rows, store every state and end the thread."""
        self._draining = self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def loop_count(self) -> int | None:
        is_serving = self._loaded.is_set() and not self._stopping and not self.model_runner.is_compiling_or_capturing
        return self._loop_count if is_serving else None

    @property
    def load(self) -> Load:
        admission = self.scheduler.admission
        rows = self.scheduler.running_rows + admission.waiting_rows + admission.paused_rows
        return Load(rows, self.scheduler.queued_tokens)

    def on_delivered(self, callback: Callable[[], None]) -> None:
        self.jobs.on_delivered = callback

    # EngineProtocol ----------------------------------------------------------------------------------------------

    def submit(self, job: Job, sink: Sink, on_admitted: OnAdmitted) -> None:
        arrived = time.monotonic()

        def put(grammars: Grammars) -> None:
            def admit() -> None:
                reply_with(on_admitted, lambda: self._admit(job, sink, arrived, grammars))

            if not self._inbox.put(admit, is_arrival=True):
                on_admitted(self._unavailable_error())

        if any(row.constraint is not None for row in job.rows):
            self._grammar_queue.prepare(job, on_admitted, put)
        else:
            put({})

    def cancel(self, job_id: str) -> None:
        self._grammar_queue.cancel(job_id)
        self._inbox.put(lambda: self.jobs.cancel(job_id))

    def confirm_turn(self, job_id: str) -> None:
        self._inbox.put(lambda: self.jobs.confirm_turn(job_id), is_arrival=True)  # arrivals behind it must not wait

    def call(self, call: calls.EngineCall[calls.Answer], reply: calls.Reply[calls.Answer]) -> None:
        if not self._inbox.put(lambda: self._handle_call(call, reply)):
            reply(self._unavailable_error())

    def _unavailable_error(self) -> ServiceError:
        return ServiceError.from_info(self._fatal_error) if self._fatal_error else draining_error()

    def _admit(self, job: Job, sink: Sink, arrived: float, grammars: Grammars) -> None:
        if self._draining or self._fatal_error is not None:
            raise self._unavailable_error()
        self.jobs.admit(self._user_files.states.resolve_mixtures(job), sink, arrived, grammars)

    def _handle_call(self, call: calls.EngineCall[Any], reply: calls.Reply[Any]) -> None:
        if self._fatal_error is not None:
            reply(self._unavailable_error())
            return
        self._calls.handle(call, reply)

    @cached_property
    def _calls(self) -> EngineCalls:
        jobs = self.jobs
        queries = (self.status, self.model_runner.pool, jobs.cancel_label, jobs.count_by_label)
        return EngineCalls(*queries, self._session_transfer, self._user_files)

    def status(self) -> dict[str, Any]:
        """Return the engine's status for /status. Engine thread."""
        return {
            "running_rows": self.scheduler.running_rows,
            "waiting_rows": self.scheduler.admission.waiting_rows,
            "waiting_interactive_rows": self.scheduler.admission.interactive.num_waiting,
            "paused_rows": self.scheduler.admission.paused_rows,
            "jobs": self.jobs.count_by_label(),
            "draining": self._draining,
            "queued_prompt_tokens": self.scheduler.queued_tokens,
            "prompt_backlog_s": round(self.throughput.prefill_time_s(self.scheduler.queued_tokens), 3),
            "speculation": self.speculation.status(),
            **self.throughput.stats(),
            **self.model_runner.status(),
        }

    # The thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._load()
        except BaseException as error:  # noqa: BLE001 - SystemExit too: `start` waits for the result
            self._failure = error
            self._fatal_error = engine_lost_error(f"the engine did not start: {describe_error(error)}")
            self._inbox.close()
            return
        finally:
            self._loaded.set()
        self._serve()

    def _load(self) -> None:
        # On this thread: torch keeps compute threads, the device and cuBLAS handles per thread.
        runner = self.model_runner = ModelRunner(self.config, self._wake.set)
        self._user_files.adapters.open(runner.pool.adapters, runner.pipeline)
        self._user_files.states.open(runner.pool, runner.arena, runner.weights.shape)
        self.state_manager = StateManager(runner.pool, runner.tokenizer, runner.overlaps)
        self.scheduler = Scheduler(runner.limits, self.state_manager, runner.has_pieces)
        slots, forget = DraftSlots(runner.pool.tiers.slots, runner.num_draft_slots), self.scheduler.forget_plain
        self.speculation = Speculation(self.config.speculate, slots, forget, runner.draft_model, runner.graphs.graph_s)
        self.jobs = JobTable(self.scheduler, self.state_manager, self.speculation, runner.tokenizer, runner.vocab)

    def _serve(self) -> None:
        try:
            while not self._stopping:
                self._loop_count += 1
                if self._inbox.run_burst(self.scheduler.is_burst):
                    self.jobs.on_delivered()  # which jobs were admitted
                if not self.step():
                    self._wake.wait(POLL_S if self.model_runner.pool.pending else IDLE_POLL_S)
                    self._wake.clear()
            self._inbox.close()
            self._inbox.run_all()
            self.jobs.fail_all(SHUTDOWN_ERROR)
            self._session_transfer.close()
            self._grammar_queue.close()
            self._user_files.close()
            self.model_runner.pool.close()
            self.jobs.deliver()
            self.jobs.abandon_all(SHUTDOWN_ERROR)
        except Exception as error:  # every job must end, and the supervisor replaces the process
            logger.critical("the engine's thread died", exc_info=True)
            self._fatal_error = engine_lost_error(f"the engine died ({describe_error(error)}) and is being restarted")
            self._inbox.close()
            self.jobs.abandon_all(self._fatal_error)
            self._inbox.run_all()

    def step(self) -> bool:
        """Schedule and launch a step. Process the oldest one if enough steps are in flight.

        One step in flight is the reference behaviour. With two, the next step is launched before the host has read the
        last tokens. With several devices, one more than the number of groups keeps all devices busy.

        Returns whether there was work.
        """
        self.model_runner.pool.poll()
        now = time.monotonic()
        self.jobs.expire(now)
        has_verified = self._verify_in_flight()
        oldest = self._in_flight[0].number if self._in_flight else self._next_step
        rows = self.speculation.add_drafts(self.scheduler.schedule(oldest, now))
        if rows:
            between_pieces = self._interleaver.begin(rows) if self.model_runner.has_pieces else None
            self._in_flight.append(self._launch(rows, between_pieces))
            self._interleaver.finish()
            self.speculation.plan_next()
        awaits_masks = bool(self._in_flight) and self._in_flight[-1].awaits_masks
        may_wait = len(self._in_flight) < self.model_runner.steps_in_flight and not awaits_masks
        has_outputs = bool(self._in_flight) and not (rows and may_wait)
        while has_outputs:
            self._process_outputs(self._in_flight.popleft(), self._interleave_now)
            self._sample_constrained()
            if not (self._in_flight and self._has_awaited_first_token(self._in_flight[-1])):
                break
        self._interleaver.finish()
        if not self._in_flight:
            self._interleaver.reset()
        self.jobs.deliver()  # of `_verify_in_flight`, and rows that ended without a step
        return bool(rows) or has_outputs or has_verified

    def _verify_in_flight(self) -> bool:
        """Process steps in flight that verify drafts, whose tokens the next step needs. Returns if there were any."""
        count = len(self._in_flight)
        while self.scheduler.limits.groups == 1 and any(one.has_drafts for one in self._in_flight):
            self._process_outputs(self._in_flight.popleft(), self._interleave_now)
            self._interleaver.finish()  # before the next step is scheduled, which may have its rows
        return len(self._in_flight) < count

    def _launch(self, rows: list[ScheduledRow], between_pieces: BetweenPieces | None = None) -> Step:
        """Launch a step part by part. A failure ends the jobs of its part, not the engine.

        between_pieces: called between pieces of the step. While interactive requests arrive, prompts of batch rows also
        run in pieces.
        """
        launched: list[InFlightStep] = []
        number, self._next_step = self._next_step, self._next_step + 1
        oldest, may_have_ended = self._in_flight[0].parts if self._in_flight else (), False
        in_pieces = between_pieces is not None and self.scheduler.has_recent_interactive
        for planned in self.model_runner.split(rows, mixes=not in_pieces):
            # A failed part may have ended rows of this one.
            part = [row for row in planned if row.sequence.is_in_steps] if may_have_ended else planned
            if not part:
                continue
            if between_pieces is not None:
                self._interleave_now(launched)
            try:
                has_pieces = part[-1].uses_device_token or (in_pieces and any(r.sequence.job.is_batch for r in part))
                started, between = self.scheduler.admission.started, between_pieces if has_pieces else None
                step = self.model_runner.launch(part, started, oldest, between)
                step.number, step.launched = number, time.monotonic()
                if self.scheduler.limits.masks_block_step:
                    self.scheduler.mask_time.count(step.costs)
            except Exception as error:  # devices raise any exception; it ends the part's jobs or the engine
                if between_pieces is not None and self._interleaver.has_failed:
                    raise
                self._fail_step(part, error)
                may_have_ended = True
                continue
            self.jobs.on_launched(part, number)
            launched.append(step)
            may_have_ended |= step.awaits_masks
            self._sample_constrained_part(step)
        return Step(number, launched)

    def _interleave_now(self, launched: Sequence[InFlightStep] = ()) -> None:
        """Launch waiting interactive prefill, unless a launched part awaits masks.

        Such a part still needs its logits for the masks. The prefill would overwrite those logits.
        """
        if not any(step.awaits_masks for step in self._in_flight) and not any(part.awaits_masks for part in launched):
            self._interleaver.interleave_now()

    def _has_awaited_first_token(self, step: Step) -> bool:
        """Return whether the step's first token would otherwise be delayed.

        It would wait for the next step of batch rows in pieces.
        """
        return (
            self.model_runner.has_pieces and self.scheduler.admission.batch.num_running > 0 and step.samples_first_token
        )

    def _sample_constrained(self) -> None:
        """Sample deferred rows whose earlier tokens the host knows by now."""
        for step in self._in_flight:
            for part in step.parts:
                self._sample_constrained_part(part)

    def _sample_constrained_part(self, part: InFlightStep) -> None:
        if not part.awaits_masks:
            return
        deferred_rows = part.deferred_rows
        try:
            failures = self.model_runner.sample_constrained(part)
        except Exception as error:  # noqa: BLE001 - as in `_launch`; rows without a constraint continue
            self._fail_step(deferred_rows, error)
            return
        self.scheduler.mask_time.charge_masks([row.sequence for row in deferred_rows], part.constrained_sample_s)
        for sequence, failure in failures:
            self.jobs.fail_grammar(sequence, failure)

    def _process_outputs(self, finished_step: Step, interleave_now: Callable[[], None] = lambda: None) -> None:
        """Read a step's sampled tokens, process and deliver them, part by part.

        Text of a step with drafts is delivered after the next launch, for which the device waits.
        interleave_now: called before each delivery
        """
        self.jobs.send_turn_starts()
        for step in finished_step.parts:
            try:
                sampled, scores = self.model_runner.read(step), self.model_runner.read_scores(step)
                self.model_runner.drafts.guess_next(step, sampled, self.speculation.model)
            except Exception as error:  # noqa: BLE001 - as in `_launch`
                self._fail_step(step.rows, error)
                continue
            self.throughput.count(step.rows, len(sampled), step.started)
            self.jobs.add_prompt_logprobs(scores)
            before = self.jobs.jump_forward.num_tokens
            self.jobs.commit(step.rows, sampled, finished_step.number)
            num_accepted = self._verify_drafts(step) if step.num_drafted else 0
            if num_added := self.jobs.jump_forward.num_tokens - before + num_accepted:
                self.throughput.count_added(num_added)
            self.speculation.count_step(step.rows, step.started, step.num_drafted, step.host_s)
            self._sample_constrained()  # before the delivery: the device waits for it
            interleave_now()
            if not finished_step.has_drafts:
                self.jobs.deliver()

    def _verify_drafts(self, step: InFlightStep) -> int:
        """Sample and commit the tokens after accepted drafts. Returns their number."""
        verify = self.model_runner.drafts.verify
        try:
            return verify(step, self.speculation, self.jobs, self._sample_constrained_part)
        except (RuntimeError, MemoryError) as error:  # of the device
            self._fail_step(step.rows, error)
            return 0
        finally:
            self.jobs.settle_drafts(step.rows)

    def _fail_step(self, rows: list[ScheduledRow], error: Exception) -> None:
        logger.error("a step over %d rows failed", len(rows), exc_info=error)
        if self.model_runner.is_device_lost():
            raise error
        info = ErrorInfo(kind=ErrorKind.INTERNAL, message=f"the step failed: {describe_error(error)}")
        if self.model_runner.is_out_of_memory(error):
            info = out_of_memory_error(len(rows), sum(row.num_tokens for row in rows))
        for job in dict.fromkeys(row.sequence.job for row in rows if self.jobs.affects_live_job(row.sequence)):
            self.jobs.fail(job, info)
