"""Expected contents of sessions: every acknowledged turn and, after a crash, perhaps one without an acknowledgement."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rwkv_batch.core.sequence import Sequence
from state_pool.session_key import SessionKey
from state_pool.sessions import Session
from test.simulation.device import fold
from test.simulation.history import Beginning, History
from test.simulation.oracle import Answer, predict
from test.simulation.violation import demand


@dataclass(eq=False)
class Turn:
    session: Session
    before: History
    tokens: list[int]
    answer: Answer
    at: float
    """when it was recorded"""
    reported: bool = False
    """whether its fate is known"""
    kept: bool = False
    gone: bool = False
    """whether its session's delete was reported"""
    safely_gone: bool = False
    """whether a power loss cannot undo that delete"""


@dataclass(eq=False)
class Gone:
    """Sessions that a delete removed."""

    histories: dict[SessionKey, list[History]]
    """histories that a crash before the report may restore"""
    sessions: set[Session]


@dataclass
class Ledger:
    """Histories by name and by the pool's session object. A name may be used again, so it is not enough."""

    lazy: bool
    now: Callable[[], float]
    used: dict[SessionKey, float] = field(default_factory=dict)
    """when a session's last turn was recorded"""
    by_key: dict[SessionKey, History] = field(default_factory=dict)
    borders: dict[SessionKey, list[int]] = field(default_factory=dict)
    """lengths of a history after each of its turns: a crash may restore any with durability "lazy" on"""
    of: dict[Session, History] = field(default_factory=dict)
    turns: dict[Sequence, Turn] = field(default_factory=dict)
    """of rows that have recorded one"""
    unsure: dict[SessionKey, list[History]] = field(default_factory=dict)
    """further histories that a crash may restore: unreported deletes and imports"""
    past: dict[SessionKey, list[History]] = field(default_factory=dict)
    """all histories of a name"""
    files: list[History] = field(default_factory=list)
    """exported histories"""
    arrived: set[str] = field(default_factory=set)
    """imported sessions, whose initial tuned state is unknown"""
    safe: dict[SessionKey, History] = field(default_factory=dict)
    """histories that a power loss leaves with synchronous=NORMAL"""
    shortened: set[SessionKey] = field(default_factory=set)
    """sessions that say that they have lost turns"""
    lost_names: set[str] = field(default_factory=set)
    """their ids, whose other dialogues may build on what was lost"""
    numbers: dict[str, int] = field(default_factory=dict)
    """largest reported dialogue number by session id"""

    def history(self, session: Session | None) -> History:
        return History() if session is None else self.of.get(session, History())

    def began_as(self, session_id: str) -> list[Beginning]:
        """Return the initial states of all of a session's histories. Those of turns in flight are included."""
        past = [history for key, known in self.past.items() if key.session_id == session_id for history in known]
        coming = [turn.before for turn in self.turns.values() if turn.session.key.session_id == session_id]
        return [history.began for history in [*past, *coming]]

    def begin(self, sequence: Sequence, tokens: list[int], began: Beginning) -> Turn:
        """Record a row's turn and check its tokens."""
        lease, request = sequence.lease, sequence.request
        assert lease is not None and request.session is not None
        before = self.history(lease.source) or History(began=began)
        prompt = request.session.resume_prompt if before else request.prompt
        answer = predict(before + prompt, request)
        demand(tokens == prompt + answer.kept, f"{lease.session.key} records {tokens}, not {prompt} + {answer.kept}")
        turn = self.turns[sequence] = Turn(lease.session, before, tokens, answer, self.now())
        return turn

    def reported(self, turn: Turn, error: Exception | None) -> None:
        """Record the pool's outcome of a turn."""
        demand(not turn.reported, f"{turn.session.key}: one turn was reported twice")
        turn.reported, turn.kept = True, error is None
        if error is not None:
            return
        demand(not turn.session.deleted, f"{turn.session.key}: a deleted session's turn was acknowledged")
        demand(self.history(turn.session) == self._own(turn), f"{turn.session.key}: two turns at once")
        self.keep(turn.session, turn.before + turn.tokens, turn.at)
        if turn.session.key.dialogue > 0:
            self._number(turn.session.key)

    def _own(self, turn: Turn) -> History:
        """Return the session's content before the turn; empty for a new dialogue."""
        return History() if turn.session.key.dialogue > 0 else turn.before

    def _number(self, key: SessionKey) -> None:
        self.numbers[key.session_id] = max(self.numbers.get(key.session_id, 0), key.dialogue)

    def keep(self, session: Session, history: History, used_at: float) -> None:
        """Set a session's history, and when it was last used."""
        self.of[session] = self.by_key[session.key] = history
        self.used[session.key] = used_at
        self.borders.setdefault(session.key, []).append(len(history))
        self.past.setdefault(session.key, []).append(history)

    def on_sync(self) -> None:
        """The disk has everything that was acknowledged."""
        self.safe = dict(self.by_key)
        for turn in self.turns.values():
            turn.safely_gone = turn.gone

    def carried(self, state: int, replay: list[int]) -> list[History]:
        """Return the exported histories that a file may contain. The file has this state and these tokens.

        Each import has its own copies: a delete of an earlier import of the file must not forget this one.
        """
        return [history[:] for history in self.files if fold(state, replay, history.began.mark) == history.stored]

    def imported(self, carried: list[History], num_tokens: int) -> History:
        """Return the history of an imported file, which was exported before."""
        fitting = [history for history in carried if len(history) == num_tokens]
        demand(fitting, f"a file of {num_tokens} tokens was imported but never exported")
        return fitting[0]

    def delete(self, sessions: Iterable[Session]) -> Gone:
        """Remove sessions. Until the delete is reported, a crash may restore them."""
        doomed = list(sessions)
        gone = Gone({}, set(doomed))
        for session in doomed:
            history = self.of.pop(session, None)
            if history is not None and self.by_key.get(session.key) is history:
                gone.histories[session.key] = self._beginnings(session.key)
                self.unsure.setdefault(session.key, []).extend(gone.histories[session.key])
                del self.by_key[session.key]
                self.borders.pop(session.key, None)
                self.safe.pop(session.key, None)
        return gone

    def deleted(self, gone: Gone) -> None:
        """Record a reported delete: no crash restores these sessions."""
        for key, histories in gone.histories.items():
            reported = {id(history) for history in histories}
            self.unsure[key] = [known for known in self.unsure.get(key, []) if id(known) not in reported]
        for turn in self.turns.values():
            turn.gone = turn.gone or turn.session in gone.sessions

    def recover(
        self, sessions: Iterable[Session], state_of: Callable[[SessionKey], int], forgets: bool = False
    ) -> None:
        """After a crash: check that every acknowledged turn is there, and nothing unknown.

        forgets: the disk may have lost what it had not synced
        """
        found = {session.key: session for session in sessions}
        for session in found.values():
            expected = self._candidates(session.key, forgets)
            if forgets:
                minimum = len(self.safe.get(session.key, ()))
                expected += [past for past in self.past.get(session.key, []) if len(past) >= minimum]
            fitting = [history for history in expected if len(history) == session.num_tokens]
            lengths = [len(history) for history in expected]
            demand(fitting, f"{session.key} holds {session.num_tokens} tokens after a crash, not one of {lengths}")
            if not all(history.is_like(fitting[0]) for history in fitting):
                state = state_of(session.key)
                fitting = [history for history in fitting if history.stored == state]
                demand(fitting, f"{session.key} holds another history than it may after a crash")
            self.unsure[session.key] = fitting[:1]
        if not self.lazy:
            lost = [key for key in (self.safe if forgets else self.by_key) if key not in found]
            demand(not lost, f"acknowledged and lost in a crash: {lost}")
        histories = {key: self.unsure[key][0] for key in found}
        for forgotten in (self.turns, self.of, self.by_key, self.unsure, self.borders):
            forgotten.clear()
        for key, session in found.items():  # a crash may have lost its last use
            self.keep(session, histories[key], -math.inf if forgets or self.lazy else self.used.get(key, -math.inf))
        self.on_sync()

    def _candidates(self, key: SessionKey, forgets: bool) -> list[History]:
        expected = self._beginnings(key)
        for turn in self.turns.values():
            is_gone = turn.safely_gone if forgets else turn.gone
            may_be_there = not turn.reported or (turn.session.deleted and not is_gone)
            if turn.session.key == key and may_be_there:
                expected.append(turn.before + turn.tokens)
        return expected + self.unsure.get(key, [])

    def _beginnings(self, key: SessionKey) -> list[History]:
        """Return a name's history, and shorter ones that a crash may leave.

        It leaves these with durability "lazy" on.
        """
        known = self.by_key.get(key)
        if known is None:
            return []
        return [known, *(known[:length] for length in self.borders.get(key, []) if self.lazy)]

    def reopen(self, sessions: Iterable[Session]) -> None:
        """After a normal restart: check that exactly the expected content is there."""
        found = {session.key: session for session in sessions}
        for key in self.shortened & set(self.by_key):
            length = found[key].num_tokens if key in found else 0
            demand(length in (0, *self.borders[key]), f"{key} holds {length} tokens, not those of whole turns")
            self.by_key[key] = self.by_key[key][:length]
            self.used.pop(key, None)  # its last turn may be one of those that were lost
            if not length:
                del self.by_key[key]
        self.shortened.clear()
        known = {key: len(history) for key, history in self.by_key.items()}
        stored = {key: session.num_tokens for key, session in found.items()}
        demand(
            stored == known,
            f"after a restart {dict(stored.items() - known.items())}, not {dict(known.items() - stored.items())}",
        )
        self.of = {session: self.by_key[key] for key, session in found.items()}
        self.on_sync()
        self.turns.clear()
