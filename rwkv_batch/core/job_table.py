"""All jobs in the engine: admission, the tokens of each step, ends.

Every admitted row sends exactly one Finish. Every job sends exactly one event with `done`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import msgspec

from rwkv_batch.core.deadlines import Deadlines
from rwkv_batch.core.drafters import Draft
from rwkv_batch.core.error_mapping import grammar_failure
from rwkv_batch.core.grammar_compile_queue import Grammars
from rwkv_batch.core.jump_forward import JumpForward
from rwkv_batch.core.row_builder import RowBuilder
from rwkv_batch.core.scheduler import ScheduledRow, Scheduler
from rwkv_batch.core.sequence import NO_SLOT, PENDING, Phase, RunningJob, Sequence
from rwkv_batch.core.speculation import Speculation
from rwkv_batch.core.state_manager import StateManager
from rwkv_batch.errors import MAY_BE_KEPT, ErrorInfo, ErrorKind, ServiceError
from rwkv_batch.protocol import Sink
from rwkv_batch.request import Delta, FinishReason, Job, JobEvents, TokenLogprob
from rwkv_batch.tokenizer import Tokenizer
from sampling.grammar.constraint import GrammarError

CONFIRM_TIMEOUT_S = 30.0
"""Seconds that a complete turn waits for `confirm_turn`. Then it ends with TIMEOUT and is not stored."""
SampledToken = tuple[int, TokenLogprob | None]
PromptScores = tuple[Sequence, list[TokenLogprob]]
"""A row and the log-probabilities of its prompt's next tokens."""


class JobTable:
    """Jobs by id. Owned by the engine's thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        state_manager: StateManager,
        speculation: Speculation,
        tokenizer: Tokenizer,
        vocab: int,
    ) -> None:
        self._scheduler = scheduler
        self._state_manager = state_manager
        self._speculation = speculation
        self._rows = RowBuilder(scheduler, state_manager.check, tokenizer, vocab)
        self._jobs: dict[str, RunningJob] = {}
        self._deadlines = Deadlines(self._jobs)
        self._leased: dict[Sequence, None] = {}
        """rows with a session, from admission to acknowledgement"""
        self._changed: dict[RunningJob, None] = {}
        self._has_turn_starts = False
        self.on_delivered: Callable[[], None] = lambda: None
        """called after the sinks of a step"""
        self.jump_forward = JumpForward(scheduler, tokenizer.byte_table)

    def __len__(self) -> int:
        return len(self._jobs)

    def count_by_label(self, client: str = "") -> dict[str, int]:
        return dict(Counter(job.spec.label for job in self._jobs.values() if client in ("", job.spec.client)))

    # Admission -----------------------------------------------------------------------------------------------

    def admit(self, job: Job, sink: Sink, arrived: float, grammars: Grammars) -> None:
        """Add a job. Raises ServiceError if it is refused; then nothing of it remains.

        arrived: time.monotonic() of its arrival
        grammars: the grammars of all its constraints
        """
        if job.job_id in self._jobs:
            raise ServiceError(
                ErrorKind.INVALID_FIELD,
                f"job id {job.job_id!r} is in use; choose another",
                field="job_id",
                given=job.job_id,
            )
        self._rows.check(job)
        running = RunningJob(job, sink, grammars, unfinished=job.num_rows, submitted_at=arrived)
        rows = self._rows.build(running)
        leased = [sequence for sequence in rows if sequence.request.session is not None]
        for sequence in rows:
            self._state_manager.check_out(sequence)
        self._jobs[job.job_id] = running
        running.live.update(dict.fromkeys(rows))
        self._leased.update(dict.fromkeys(leased))
        if running.deadline is not None:
            self._deadlines.add(running, running.deadline)
        self._scheduler.add(running, rows)

    # Steps ---------------------------------------------------------------------------------------------------

    def on_launched(self, rows: list[ScheduledRow], step: int) -> None:
        """Record that step `step` is launched. More steps may be scheduled before its tokens are known."""
        for row in rows:
            sequence = row.sequence
            if row.is_plain:
                sequence.num_computed_tokens += 1
                sequence.token_ids.append(PENDING)
                sequence.last_sample_step = step
                continue
            uses_more_slots = sequence.cache_points or sequence.members
            if sequence.shared is None and sequence.spare_slot == NO_SLOT and not uses_more_slots:
                # The row reads and writes its own slot only, so no slot changes hands.
                sequence.num_computed_tokens += row.num_tokens
            else:
                if sequence.lease is not None and not sequence.session_reported:
                    sequence.session_reported = True
                    self._report_session(sequence, sequence.lease.history, sequence.replayed_tokens)
                self._state_manager.advance(sequence, row.num_tokens)
            if row.samples_token:
                if not sequence.has_sampled:
                    sequence.prefill_s = time.monotonic() - sequence.job.submitted_at - sequence.queue_s
                sequence.token_ids.append(PENDING)
                sequence.last_sample_step = step
            elif not sequence.may_sample and sequence.num_uncomputed_tokens == 0:
                self._prompt_done(sequence)

    def _report_session(
        self, sequence: Sequence, history: tuple[int, int], replayed: int, is_complete: bool = False
    ) -> None:
        """Report that a turn begins, or that a branch is complete. See `Job.must_confirm`."""
        if sequence.job.spec.return_token_ids and sequence in sequence.job.live:
            report = Delta(sequence.row, b"", 0, None, None, None, [], history, replayed, is_complete)
            sequence.job.deltas.append(report)
            self._changed[sequence.job] = None
            self._has_turn_starts = True

    def send_turn_starts(self) -> None:
        """Send the pending starts of turns. Call before a step's tokens are processed and recorded."""
        if self._has_turn_starts:
            self._has_turn_starts = False
            self.deliver()

    def commit(self, rows: list[ScheduledRow], sampled: list[SampledToken], step: int) -> None:
        """Process the sampled tokens of step `step`.

        sampled: one token per row that samples, in the order of `rows`
        """
        sampling_rows = [row.sequence for row in rows if row.samples_token]
        changed, running = self._changed, Phase.RUNNING  # locals: the loop runs for every row of every step
        for sequence, (token, logprob) in zip(sampling_rows, sampled, strict=True):
            if sequence.phase is not running or sequence.discarded_sample_step == step:
                continue  # the row ended while the step ran, or jump-forward already appended this token
            output, matcher = sequence.output, sequence.matcher
            if matcher is None or matcher.add_text(token):
                outcome, is_set = output.process_token(token, logprob), False
            else:
                try:
                    outcome, is_set = self.jump_forward.process_token(sequence, matcher, token, logprob), True
                except GrammarError as error:
                    self.fail_grammar(sequence, error)
                    continue
            if outcome is not None and not isinstance(outcome, Delta):  # mostly None: the cheap check comes first
                self._state_manager.truncate(sequence)
                self._finish(sequence, outcome)
                continue
            if not is_set:
                sequence.token_ids[sequence.prompt_end + len(output.tokens) - 1] = token
            if sequence.lease is not None and sequence.draft is None:
                self._state_manager.update_rollback_state(sequence)
            if outcome is not None:
                job = sequence.job
                job.deltas.append(outcome)
                changed[job] = None
        for sequence in [row.sequence for row in rows if row.ends]:
            if sequence.phase is running:
                self._finish(sequence, FinishReason.LENGTH)

    def commit_ahead(self, sequence: Sequence, draft: Draft) -> int:
        """Process the tokens of an accepted draft that were sampled ahead. Returns their number."""
        for token in draft.accepted if sequence.phase is Phase.RUNNING else ():
            draft.num_accepted += 1
            sequence.token_ids.append(token)
            outcome = sequence.output.process_token(token)
            if outcome is None:
                continue
            if not isinstance(outcome, Delta):
                self._state_manager.truncate(sequence)
                self._finish(sequence, outcome)
                break
            sequence.job.deltas.append(outcome)
            self._changed[sequence.job] = None
        return draft.num_accepted

    def settle_drafts(self, rows: list[ScheduledRow]) -> None:
        """End the drafts of a step's rows. All accepted tokens are committed."""
        for sequence in [row.sequence for row in rows if row.draft is not None and row.draft is row.sequence.draft]:
            self._speculation.settle(sequence)
            if sequence.lease is not None:
                self._state_manager.update_rollback_state(sequence)

    def add_prompt_logprobs(self, scores: list[PromptScores]) -> None:
        """Add the prompt log-probabilities that a step returned. Call before `commit`."""
        for sequence, logprobs in scores:
            job = sequence.job
            row = sequence
            if not sequence.may_sample:  # a shared prompt: its first continuation gets the scores
                row = next((one for one in job.live if one.row == sequence.row), sequence)
            if row in job.live:  # else the row ended while the step ran
                job.deltas.append(Delta(sequence.row, b"", 0, prompt_logprobs=logprobs))
                self._changed[job] = None

    def _prompt_done(self, sequence: Sequence) -> None:
        """Handle a row that has read all its tokens and samples none: a closed turn or a shared prompt."""
        if sequence.phase is Phase.CLOSING:
            self._check_in(sequence)
            return
        children = self._rows.continuations(sequence.job, sequence.row, sequence.request)
        self._state_manager.fork(sequence, children)
        self._scheduler.remove(sequence)
        sequence.job.live.pop(sequence)
        sequence.job.live.update(dict.fromkeys(children))
        self._scheduler.add_forked(children)

    # Ends ----------------------------------------------------------------------------------------------------

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a row after its last token."""
        if sequence.lease is None:
            self._end(sequence, reason)
            return
        self._scheduler.release_req_slot(sequence)
        sequence.phase = Phase.CLOSING
        self._state_manager.close_turn(sequence)
        if sequence.job.is_confirmed:
            self._record(sequence, reason)
        else:
            sequence.job.held_reason = reason
            if sequence.lease.branch:
                self._report_session(sequence, sequence.lease.history, 0, is_complete=True)
            self._deadlines.add(sequence.job, time.monotonic() + CONFIRM_TIMEOUT_S)
        if sequence.num_uncomputed_tokens == 0:
            self._check_in(sequence)

    def confirm_turn(self, job_id: str) -> None:
        """Store the job's turn as soon as it has ended. Its HTTP worker knows that the turn began."""
        if (job := self._jobs.get(job_id)) is None:
            return
        reason, job.held_reason, job.is_confirmed = job.held_reason, None, True
        if reason is None:
            return
        for sequence in list(job.live):
            self._record(sequence, reason)
            if sequence.phase is Phase.ANSWERED:
                self._state_manager.check_in(sequence)

    def _record(self, sequence: Sequence, reason: FinishReason) -> None:
        def acknowledge(error: ServiceError | None) -> None:
            self._leased.pop(sequence, None)
            self._send_finish(sequence, FinishReason.ERROR if error else reason, error.info if error else None)

        self._speculation.keep_text(sequence)
        self._state_manager.record_turn(sequence, acknowledge)

    def _check_in(self, sequence: Sequence) -> None:
        """Leave the steps. A held turn keeps its slots until it is confirmed."""
        if sequence.is_recorded:
            self._state_manager.check_in(sequence)
        self._scheduler.remove(sequence)

    def _end(self, sequence: Sequence, reason: FinishReason, error: ErrorInfo | None = None) -> None:
        """End a row without keeping its session's turn."""
        self._leased.pop(sequence, None)
        self._drop(sequence)
        self._send_finish(sequence, reason, error)

    def _drop(self, sequence: Sequence) -> None:
        """Remove a row from the steps and free its slots and session. A recorded turn is still acknowledged."""
        self._speculation.drop(sequence)
        self._state_manager.release(sequence)
        self._scheduler.remove(sequence)

    def _send_finish(self, sequence: Sequence, reason: FinishReason, error: ErrorInfo | None = None) -> None:
        job = sequence.job
        if sequence not in job.live:
            return  # the job was cancelled
        job.live.pop(sequence)
        self._speculation.count_drafts()
        sequence.output.flush_held_text()
        for row in range(sequence.row, sequence.row + sequence.fork_count):
            finish = sequence.finish(reason, error)
            delta = sequence.output.pop_delta(finish)
            assert delta is not None
            delta = msgspec.structs.replace(delta, row=row)
            job.deltas.append(delta)
            job.unfinished -= 1
        self._changed[job] = None

    def cancel(self, job_id: str) -> None:
        if (job := self._jobs.get(job_id)) is not None:
            self._end_job(job, FinishReason.CANCELLED)

    def cancel_label(self, label: str, client: str = "") -> int:
        """Cancel all jobs with a label, optionally of one client only. Returns their number."""
        jobs = [job for job in self._jobs.values() if job.spec.label == label and client in ("", job.spec.client)]
        for job in jobs:
            self._end_job(job, FinishReason.CANCELLED)
        return len(jobs)

    def expire(self, now: float) -> None:
        """End jobs past their deadline and rows whose session failed."""
        for job in self._deadlines.pop_due(now):
            self._end_job(job, FinishReason.TIMEOUT)
        for sequence in list(self._leased):
            if (error := self._state_manager.failure(sequence)) is not None:
                if sequence.phase is Phase.WAITING:
                    self._scheduler.remove_waiting(sequence.job)
                self._end(sequence, FinishReason.ERROR, error.info)

    def _end_job(self, job: RunningJob, reason: FinishReason) -> None:
        """End a job's rows. A recorded turn is kept and still acknowledged, unless the job was cancelled."""
        self._scheduler.remove_waiting(job)
        for sequence in list(job.live):
            if not sequence.is_recorded:
                self._end(sequence, reason)
            elif reason is not FinishReason.TIMEOUT:
                self._send_finish(sequence, reason)

    def fail(self, job: RunningJob, error: ErrorInfo) -> None:
        """End a job because a step failed. For a recorded turn, the pool decides whether it is kept."""
        rows = self._rows_of(job)
        if not all(sequence.is_recorded for sequence in rows):
            self._abort(job, error)
            return
        for sequence in rows:
            self._drop(sequence)

    def affects_live_job(self, sequence: Sequence) -> bool:
        """Return whether a failed step over this row ends its job.

        True if the row is in the steps, or if running rows continue its prompt.
        """
        if sequence.is_in_steps:
            return True
        live = sequence.job.live
        has_forked = not sequence.may_sample and sequence not in live
        return has_forked and any(0 <= row.row - sequence.row < sequence.fork_count for row in live)

    def fail_grammar(self, sequence: Sequence, error: GrammarError) -> None:
        """End a row's job because its grammar cannot continue."""
        self.fail(sequence.job, grammar_failure(sequence.request, error))

    def _rows_of(self, job: RunningJob) -> list[Sequence]:
        """Rows that have not ended, and ended rows that still read."""
        return list(dict.fromkeys([*job.live, *self._scheduler.running_of(job)]))

    def _abort(self, job: RunningJob, error: ErrorInfo) -> None:
        self._scheduler.remove_waiting(job)
        rows = self._rows_of(job)
        job.live.clear()  # the error is all that is sent
        for sequence in rows:
            self._leased.pop(sequence, None)
            self._drop(sequence)
        self._changed.pop(job, None)
        if self._jobs.get(job.job_id) is job:
            del self._jobs[job.job_id]
            failure = error if job.unfinished else None
            job.sink(JobEvents(job_id=job.job_id, deltas=job.deltas, done=True, error=failure))
            self.on_delivered()

    def fail_all(self, error: ErrorInfo) -> None:
        """End every job. For recorded turns, the pool decides, so poll or close it afterwards."""
        for job in list(self._jobs.values()):
            self.fail(job, error)
        for sequence in list(self._leased):  # answered turns of cancelled jobs
            self._drop(sequence)

    def abandon_all(self, error: ErrorInfo) -> None:
        """End every job when the pool no longer answers. Recorded turns may or may not be kept."""
        for job in list(self._jobs.values()):
            failure = error
            if any(sequence.is_recorded for sequence in self._rows_of(job)):
                failure = msgspec.structs.replace(error, message=f"{error.message}; {MAY_BE_KEPT}", retry_after_s=None)
            self._abort(job, failure)

    # Delivery ------------------------------------------------------------------------------------------------

    def deliver(self) -> None:
        """Send the deltas of this step, one event per job."""
        for job in self._changed:
            done = job.unfinished == 0
            if done:
                self._jobs.pop(job.job_id, None)
            job.sink(JobEvents(job_id=job.job_id, deltas=job.deltas, done=done))
            job.deltas = []
        self._changed.clear()
        self.on_delivered()
