"""Histories that a session may have, given its requests and their answers.

One linear order must explain all.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rwkv_batch.request import GenerateRequest
from test.simulation.history import History
from test.simulation.oracle import predict
from test.simulation.violation import demand

Outcome = tuple[bytes, int]
"""A turn's text, and the tokens of its session and its prompt."""
DELETED: Outcome = (b"", -1)
MAX_OPEN = 4
"""Requests whose outcome may be unknown."""


@dataclass(frozen=True)
class Candidate:
    tokens: tuple[int, ...] = ()
    open: frozenset[int] = frozenset()
    """requests that may still take effect"""
    outcomes: frozenset[tuple[int, Outcome]] = frozenset()
    """those that have, without an answer so far, and what they must answer"""


@dataclass
class LinearSession:
    """A session. A request without an answer may take effect once, at any later time, or never."""

    requests: dict[int, GenerateRequest | None] = field(default_factory=dict)
    """None: a delete"""
    candidates: set[Candidate] = field(default_factory=lambda: {Candidate()})
    num_waiting: int = 0

    @property
    def is_unclear(self) -> bool:
        """Whether too many requests may take effect later."""
        return any(len(one.open) > MAX_OPEN for one in self.candidates) or len(self.candidates) > 100

    def begin(self, number: int, request: GenerateRequest | None) -> None:
        self.requests[number] = request
        self.num_waiting += 1
        self.candidates = {Candidate(one.tokens, one.open | {number}, one.outcomes) for one in self.candidates}

    def answered(self, number: int, outcome: Outcome) -> None:
        """A request has taken effect. Raises Violation if no history explains its answer."""
        self.num_waiting -= 1
        reachable, found = self._reachable(), (number, outcome)
        fitting = [one for one in reachable if found in one.outcomes]
        fit = {known for one in reachable for at, known in one.outcomes if at == number}
        demand(fitting, f"request {number} answers {outcome}, which fits no history of the session: {fit}")
        self.candidates = {Candidate(one.tokens, one.open, one.outcomes - {found}) for one in fitting}

    def failed(self, number: int, may_be_kept: bool) -> None:
        """A request has failed: it has not taken effect, or perhaps it has or will."""
        self.num_waiting -= 1
        if may_be_kept:
            return
        self.candidates = {
            Candidate(one.tokens, one.open - {number}, one.outcomes)
            for one in self.candidates
            if number not in dict(one.outcomes)
        }
        demand(self.candidates, "a turn was kept although its request was refused")

    def _reachable(self) -> set[Candidate]:
        found, new = set(self.candidates), list(self.candidates)
        while new:
            one = new.pop()
            for number in one.open:
                afters = {self._after(one, number)}
                if self.requests[number] is None:
                    afters |= {self._begun_again(after) for after in afters}
                new += afters - found
                found |= afters
        return found

    def _begun_again(self, deleted: Candidate) -> Candidate:
        """Return the history in which turns that began the deleted session, without an answer, may begin it again.

        Their engine was lost. The session's length, zero as before, does not show that they were stored and deleted.
        """
        again = {
            (number, outcome)
            for number, outcome in deleted.outcomes
            if (request := self.requests[number]) is not None and outcome[1] == len(request.prompt)
        }
        return Candidate((), deleted.open | {number for number, _ in again}, deleted.outcomes - again)

    def _after(self, one: Candidate, number: int) -> Candidate:
        """Return the history after a request took effect."""
        request, is_open = self.requests[number], one.open - {number}
        if request is None:
            return Candidate((), is_open, one.outcomes | {(number, DELETED)})
        assert request.session is not None
        prompt = request.session.resume_prompt if one.tokens else request.prompt
        answer = predict(History([*one.tokens, *prompt]), request)
        outcome = answer.text, len(one.tokens) + len(prompt)
        return Candidate((*one.tokens, *prompt, *answer.kept), is_open, one.outcomes | {(number, outcome)})
