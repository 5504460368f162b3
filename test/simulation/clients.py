"""The clients of a world: their requests and the events they receive. The judge checks each event."""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from rwkv_batch.calls import DeleteSessions, EngineCall, ExportSession, ImportSession
from rwkv_batch.errors import ServiceError
from rwkv_batch.request import Delta, GenerateRequest, Job, JobEvents, Priority, PromptLogprobs, SessionTurn
from sampling.params import SamplingParams
from state_pool.session_file import SessionFile, decode
from state_pool.session_key import LINEAR, SessionKey
from test.simulation.device import ALPHABET, fold
from test.simulation.faults import CROWD
from test.simulation.history import History
from test.simulation.judge import Judge, Submission
from test.simulation.violation import Violation, demand

if TYPE_CHECKING:
    from test.simulation.world import World

MAX_WAITING_JOBS = 14
LOG_LINES = 60
_STOPS = [b"ab", b"\n\n", b"ba\nb", b"stop", b"aba", b"b b", "é".encode()]


class Clients:
    """Sends requests and receives events. All choices come from one generator."""

    def __init__(self, world: World, rng: random.Random, scoring: random.Random | None) -> None:
        """scoring: generator for scoring requests; None: no scoring"""
        self.log: deque[str] = deque(maxlen=LOG_LINES)
        self.digest = 0
        """hash of all log lines, equal for two runs of a seed"""
        self.counts = {"jobs": 0, "rows": 0, "turns": 0, "errors": 0, "refused": 0, "calls": 0}
        self.open_jobs: dict[str, Submission] = {}
        self.open_calls: dict[int, str] = {}
        self._world = world
        self._rng = rng
        self._scoring = scoring
        self._number = 0
        self._judge = Judge(world, self.counts)
        self._files: list[tuple[bytes, History]] = []
        """exported sessions with their histories"""
        self._openings = [self._tokens(33, 44) for _ in range(3)]
        self._openings.append(self._openings[0] + self._tokens(33, 40))

    def _tokens(self, minimum: int, maximum: int) -> list[int]:
        return [self._rng.choice(ALPHABET) for _ in range(self._rng.randint(minimum, maximum))]

    def deleted(self, name: str) -> None:
        """A session was deleted without a request."""
        self._judge.deletes.append((self._world.tasks.now, name, False))

    def log_event(self, text: str) -> None:
        """Record a line for readers of a failure."""
        line = f"{self._world.counts['steps']:4} {self._world.tasks.now:8.3f} {text}"
        self.digest = zlib.crc32(line.encode(), self.digest)
        self.log.append(line)

    def describe(self) -> str:
        return f"jobs {list(self.open_jobs)}, calls {list(self.open_calls.values())}"

    # Requests ------------------------------------------------------------------------------------------------

    def fill(self) -> None:
        """Give every session a first turn."""
        for number in range(CROWD):
            self._turn(branches=False, name=f"s{number}")
        self._world.drain()

    def act(self) -> None:
        rng = self._rng
        if self._world.settings.is_crowded:
            self._crowd()
        for _ in range(rng.choice((0, 0, 1, 1, 3))):
            kind = rng.random()
            if kind < 0.30:
                self._turn(branches=False)
            elif kind < 0.38:
                self._turn(branches=True)
            elif kind < 0.72:
                self._rows()
            elif kind < 0.80 and self.open_jobs:
                self._cancel(rng.choice(list(self.open_jobs)))
            elif kind < 0.84:
                self._delete()
            elif kind < 0.88:
                self._export()
            elif kind < 0.92:
                self._import()

    def _crowd(self) -> None:
        """Let sessions on disk, and some in memory, talk. The store hangs meanwhile."""
        faults = self._world.faults
        if not faults.quiet and self._world.tasks.now >= faults.hangs_until:
            faults.hang(30.0)
        talking = {row.session.session_id for one in self.open_jobs.values() for row in one.job.rows if row.session}
        idle = [name for number in range(CROWD) if (name := f"s{number}") not in talking]
        for name in self._rng.sample(idle, min(len(idle), 8)):
            self._turn(branches=False, name=name)

    def _request(self, prompt: list[int], session: SessionTurn | None = None, n: int = 1) -> GenerateRequest:
        rng = self._rng
        return GenerateRequest(
            prompt=prompt,
            max_tokens=rng.choice((1, 2, 5, 12, 12)),
            sampling=SamplingParams(seed=rng.choice((7, rng.randrange(1 << 64)))),
            stop_ids=rng.sample(ALPHABET, rng.choice((0, 0, 1))),
            stop_strings=rng.sample(_STOPS, rng.choice((0, 1, 2))),
            ignore_eos=rng.random() < 0.3,
            chunk_size=rng.choice((0, 1, 4)),
            n=n,
            session=session,
            use_prefix_cache=rng.random() < 0.9,
        )

    def _prompt(self) -> list[int]:
        if self._rng.random() < 0.7:
            return self._rng.choice(self._openings) + self._tokens(0, 6)
        return self._tokens(1, 20)

    def _session(self) -> str:
        return f"s{self._rng.randrange(self._world.settings.num_sessions)}"

    def _turn(self, branches: bool, name: str = "") -> None:
        name, parent = name or self._session(), None
        if branches:
            known = [key.dialogue for key in self._world.ledger.by_key if key.session_id == name and key.dialogue > 0]
            parent = self._rng.choice([0, *known, self._rng.randrange(6)])
        session = SessionTurn(
            session_id=name, resume_prompt=self._tokens(1, 12), branch_from=parent, wait=self._rng.random() < 0.7
        )
        request = self._request(self._tokens(1, 12), session)
        self._submit([request if self._world.own is None else self._world.own.add_weights(request, name)])

    def _rows(self) -> None:
        number = self._rng.choice((1, 1, 1, 2, 5))
        requests = [self._request(self._prompt(), n=self._rng.choice((1, 1, 1, 2, 4))) for _ in range(number)]
        if self._world.own is not None:
            requests = [self._world.own.add_weights(one) for one in requests]
        self._submit(requests if self._scoring is None else [self._scored(one, self._scoring) for one in requests])

    def _scored(self, request: GenerateRequest, rng: random.Random) -> GenerateRequest:
        """Perhaps add scoring, candidates or max_tokens 0 to the request."""
        length, changes = len(request.prompt), {}
        if request.mixture:
            return request
        if rng.random() < 0.6:
            start = rng.choice((1, 1, 2, max(1, length // 2), length))
            changes["prompt_logprobs"] = PromptLogprobs(start=start)
        if request.n == 1 and rng.random() < 0.4:
            ends = [[rng.choice(ALPHABET) for _ in range(rng.randint(1, 5))] for _ in range(rng.randint(1, 4))]
            changes["candidates"] = ends
        if rng.random() < 0.4:
            changes["max_tokens"] = 0
        return msgspec.structs.replace(request, **changes)

    def _submit(self, requests: list[GenerateRequest]) -> None:
        if len(self.open_jobs) >= MAX_WAITING_JOBS and not self._world.settings.is_crowded:
            return
        self._number += 1
        timeout = self._rng.choice((None, None, None, 0.02, 0.3, 3.0)) if not self._world.settings.is_crowded else None
        job = Job(
            job_id=f"job{self._number}",
            rows=requests,
            timeout_s=timeout,
            client=self._rng.choice(("", "one", "two", "two")),
            priority=self._rng.choice((Priority.AUTO, Priority.AUTO, Priority.BATCH)),
            return_token_ids=True,
        )
        rows = [(request, i) for request in requests for i in range(request.num_rows)]
        submission = Submission(job, self._world.tasks.now, rows)
        self.open_jobs[job.job_id] = submission
        self.counts["jobs"] += 1
        reported = [
            (len(r.prompt), r.num_rows, r.max_tokens, r.session and (r.session.session_id, r.session.branch_from))
            for r in requests
        ]
        self.log_event(f"{job.job_id} asks for {reported}, timeout {timeout}")
        self._world.engine.submit(
            job, lambda events: self._receive(submission, events), lambda refusal: self._admitted(submission, refusal)
        )

    def _cancel(self, job_id: str) -> None:
        self.log_event(f"{job_id} is cancelled")
        self.open_jobs[job_id].cancelled = True
        self._world.engine.cancel(job_id)

    def _call(self, what: str, call: EngineCall[Any], answered: Callable[[Any], None]) -> None:
        self._number += 1
        self.counts["calls"] += 1
        number = self._number
        self.open_calls[number] = what
        self.log_event(what)

        def reply(value: Any) -> None:
            demand(self.open_calls.pop(number, None) is not None, f"{what} was answered twice")
            self.log_event(f"{what}: {value if not isinstance(value, bytes) else len(value)!r}")
            answered(value)

        self._world.engine.call(call, reply)

    def _delete(self) -> None:
        name, prefix = self._session(), self._rng.random() < 0.2
        self._judge.deletes.append((self._world.tasks.now, name, prefix))

        def answered(value: Any) -> None:
            if isinstance(value, ServiceError):
                demand(self._world.faults.since(0.0, "disk", "thread", "read"), f"a delete failed: {value}")

        self._call(f"delete {name!r} prefix {prefix}", DeleteSessions(name, prefix), answered)

    def _export(self) -> None:
        if not self._world.ledger.by_key:
            return
        key = self._rng.choice(list(self._world.ledger.by_key))
        at = self._world.tasks.now

        def answered(value: Any) -> None:
            if isinstance(value, ServiceError):
                self._judge.check_call_error(value.info, at, key.session_id)
                return
            file = decode(value)
            history = self._fitting(file, key)
            self._files = [*self._files[-3:], (value, history)]
            self._world.ledger.files.append(history)

        dialogue = None if key.dialogue == LINEAR else key.dialogue
        self._call(f"export {key}", ExportSession(key.session_id, dialogue), answered)

    def _fitting(self, file: SessionFile, key: SessionKey) -> History:
        """Return the history of the file: the session's after one of its turns."""
        kept = int.from_bytes(file.parts.get("a.wkv", b"") + file.parts.get("a.shift", b""), "little")
        for history in self._world.ledger.past.get(key, []):
            state = fold(kept, file.replay, history.began.mark)
            if len(history) == file.num_tokens and history.stored == state:
                return history
        raise Violation(f"an export of {key} with {file.num_tokens} tokens is none of its histories")

    def _import(self) -> None:
        if not self._files:
            return
        content, history = self._rng.choice(self._files)
        name, at = self._session(), self._world.tasks.now
        damaged = self._rng.random() < 10 * self._world.settings.bad_import
        if damaged:
            content = _damage(content, self._rng)

        def answered(value: Any) -> None:
            if isinstance(value, ServiceError):
                self._judge.check_call_error(value.info, at, name, importing=True)
            elif damaged:
                demand(value == len(history), f"a damaged file was taken for {value} tokens")

        what = f"import {name} {'damaged' if damaged else len(history)}"
        self._call(what, ImportSession(name, content), answered)

    # Events --------------------------------------------------------------------------------------------------

    def _admitted(self, submission: Submission, refusal: ServiceError | None) -> None:
        demand(submission.admitted is None, f"{submission.job.job_id} was admitted twice")
        submission.admitted = refusal is None
        if refusal is None:
            job: Any = self._world.engine.jobs._jobs[submission.job.job_id]
            self._note_rows(submission, job)
            return
        self.log_event(f"{submission.job.job_id} is refused: {refusal}")
        self.counts["refused"] += 1
        del self.open_jobs[submission.job.job_id]
        self._judge.check_refusal(submission, refusal.info)

    def _note_rows(self, submission: Submission, job: Any) -> None:
        for sequence in job.live:
            submission.sequences.setdefault(sequence.row, sequence)

    def _receive(self, submission: Submission, events: JobEvents) -> None:
        name = submission.job.job_id
        demand(not submission.done, f"{name}: events after its end")
        demand(submission.admitted, f"{name}: events before its admission")
        for delta in events.deltas:
            self._take(submission, delta)
        if events.error is not None:
            self.log_event(f"{name} failed: {events.error}")
            self._judge.explain(submission, submission.rows[0][0], events.error)
            for row, (request, i) in enumerate(submission.rows):
                if row not in submission.finishes:
                    self._judge.check_part(submission, row, request, i)
        if events.done:
            submission.done = True
            demand(
                events.error or len(submission.finishes) == len(submission.rows), f"{name} is done without all its rows"
            )
            del self.open_jobs[name]

    def _take(self, submission: Submission, delta: Delta) -> None:
        row = delta.row
        demand(row not in submission.finishes, f"{submission.job.job_id} row {row}: events after its finish")
        if delta.prompt_logprobs:
            demand(
                not submission.texts.get(row), f"{submission.job.job_id} row {row}: its prompt is scored after its text"
            )
            submission.scores.setdefault(row, []).extend(entry.logprob for entry in delta.prompt_logprobs)
        submission.replayed += delta.replayed_tokens
        submission.texts[row] = submission.texts.get(row, b"") + delta.text
        submission.tokens[row] = submission.tokens.get(row, 0) + delta.num_tokens
        if delta.finish is not None:
            finish = submission.finishes[row] = delta.finish
            self.counts["rows"] += 1
            why = finish.error.message if finish.error else ""
            self.log_event(f"{submission.job.job_id} row {row}: {finish.reason} {submission.texts[row]!r} {why}")
            self._judge.check_finish(submission, row, finish)

    def check_step(self) -> None:
        """Check that no request waits past its timeout."""
        now = self._world.tasks.now
        for submission in self.open_jobs.values():
            if submission.job.timeout_s is not None and submission.admitted:
                late = now - submission.at - submission.job.timeout_s > 0.2
                closing = submission.rows[0][0].session is not None
                demand(not late or closing, f"{submission.job.job_id} is past its time")

    def lost(self) -> None:
        """Drop all open requests: the engine was killed."""
        self.log_event("killed")
        self.open_jobs.clear()
        self.open_calls.clear()


def _damage(content: bytes, rng: random.Random) -> bytes:
    kind = rng.randrange(4)
    if kind == 0:
        return content[: rng.randrange(len(content))]
    if kind == 1:
        at = rng.randrange(len(content))
        return content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :]
    number = str(rng.choice((10**30, -1, 1 << 63, 1 << 40))).encode()
    start = content.index(b'"num_tokens":"') + len(b'"num_tokens":"')
    end = content.index(b'"', start)
    return _with_header(content, content[:start] + number + content[end:])


def _with_header(old: bytes, new: bytes) -> bytes:
    """Return the file with a changed header and its length updated."""
    length = int.from_bytes(old[:8], "little") + len(new) - len(old)
    return length.to_bytes(8, "little") + new[8:]
