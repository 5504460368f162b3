"""What the sessions must hold: every acknowledged turn, and after a crash perhaps one that was not told."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rwkv_batch.core.sequence import Sequence
from state_pool.sessions import Session, SessionKey
from test.simulation.device import fold
from test.simulation.history import Beginning, History
from test.simulation.oracle import Answer, predict
from test.simulation.violation import demand


@dataclass(eq=False)
class Turn:
    """A turn that was recorded."""

    session: Session
    before: History
    tokens: list[int]
    answer: Answer
    told: bool = False
    """whether its fate is known"""
    kept: bool = False
    gone: bool = False
    """whether its session was deleted, and that was told"""


@dataclass(eq=False)
class Gone:
    """What a delete has taken."""

    histories: dict[SessionKey, list[History]]
    """all that a crash before it is told may bring back"""
    sessions: set[Session]


@dataclass
class Ledger:
    """Histories by name and by the pool's own object, since a name may be used again."""

    lazy: bool
    by_key: dict[SessionKey, History] = field(default_factory=dict)
    borders: dict[SessionKey, list[int]] = field(default_factory=dict)
    """lengths of a history after each of its turns: what a crash may leave with durability "lazy\""""
    of: dict[Session, History] = field(default_factory=dict)
    turns: dict[Sequence, Turn] = field(default_factory=dict)
    """of rows that have recorded one"""
    unsure: dict[SessionKey, list[History]] = field(default_factory=dict)
    """what a crash may bring back besides: deletes and imports that were not told"""
    past: dict[SessionKey, list[History]] = field(default_factory=dict)
    """every history that a name ever had"""
    files: list[History] = field(default_factory=list)
    """what was carried away"""
    arrived: set[str] = field(default_factory=set)
    """sessions that were imported: which tuned state such a one began from is not known any more"""
    numbers: dict[str, int] = field(default_factory=dict)
    """largest dialogue number told, by session id"""

    def history(self, session: Session | None) -> History:
        """Tokens of a session of the pool."""
        return History() if session is None else self.of.get(session, History())

    def began_as(self, session_id: str) -> list[Beginning]:
        """What a session's histories of all time began from, those of turns on their way among them."""
        past = [history for key, known in self.past.items() if key.session_id == session_id for history in known]
        coming = [turn.before for turn in self.turns.values() if turn.session.key.session_id == session_id]
        return [history.began for history in [*past, *coming]]

    def begin(self, sequence: Sequence, tokens: list[int], began: Beginning) -> Turn:
        """A row records `tokens` as its session's turn; what it records must be what it should answer."""
        lease, request = sequence.lease, sequence.request
        assert lease is not None and request.session is not None
        before = self.history(lease.source) or History(began=began)
        prompt = request.session.resume_prompt if before else request.prompt
        answer = predict(before + prompt, request)
        demand(tokens == prompt + answer.kept, f"{lease.session.key} records {tokens}, not {prompt} + {answer.kept}")
        turn = self.turns[sequence] = Turn(lease.session, before, tokens, answer)
        return turn

    def told(self, turn: Turn, error: Exception | None) -> None:
        """The pool says what became of a turn."""
        demand(not turn.told, f"{turn.session.key}: told twice of one turn")
        turn.told, turn.kept = True, error is None
        if error is not None:
            return
        demand(not turn.session.deleted, f"{turn.session.key}: a deleted session's turn was acknowledged")
        demand(self.history(turn.session) == self._own(turn), f"{turn.session.key}: two turns at once")
        self.keep(turn.session, turn.before + turn.tokens)
        if turn.session.key.dialogue > 0:
            self._number(turn.session.key)

    def _own(self, turn: Turn) -> History:
        """What the turn's session held before: a new dialogue nothing."""
        return History() if turn.session.key.dialogue > 0 else turn.before

    def _number(self, key: SessionKey) -> None:
        self.numbers[key.session_id] = max(self.numbers.get(key.session_id, 0), key.dialogue)

    def keep(self, session: Session, history: History) -> None:
        """A session has this history now."""
        self.of[session] = self.by_key[session.key] = history
        self.borders.setdefault(session.key, []).append(len(history))
        self.past.setdefault(session.key, []).append(history)

    def carried(self, state: int, replay: list[int]) -> list[History]:
        """Histories that were carried away and that a file with this state, and what follows it, may stand for."""
        return [history for history in self.files if fold(state, replay, history.began.mark) == history.stored]

    def imported(self, carried: list[History], num_tokens: int) -> History:
        """The history of a file that was taken in: one that was carried away before."""
        fitting = [history for history in carried if len(history) == num_tokens]
        demand(fitting, f"a file of {num_tokens} tokens was taken that nobody has carried away")
        return fitting[0]

    def delete(self, sessions: Iterable[Session]) -> Gone:
        """They are gone; until that is told, a crash may bring them back."""
        doomed = list(sessions)
        gone = Gone({}, set(doomed))
        for session in doomed:
            history = self.of.pop(session, None)
            if history is not None and self.by_key.get(session.key) is history:
                gone.histories[session.key] = self._beginnings(session.key)
                self.unsure.setdefault(session.key, []).extend(gone.histories[session.key])
                del self.by_key[session.key]
                self.borders.pop(session.key, None)
        return gone

    def deleted(self, gone: Gone) -> None:
        """A delete is told: nothing brings these back."""
        for key, histories in gone.histories.items():
            told = {id(history) for history in histories}
            self.unsure[key] = [known for known in self.unsure.get(key, []) if id(known) not in told]
        for turn in self.turns.values():
            turn.gone = turn.gone or turn.session in gone.sessions

    def recover(self, sessions: Iterable[Session], state_of: Callable[[SessionKey], int]) -> None:
        """After a crash: every acknowledged turn is there, and nothing that nobody wrote."""
        found = {session.key: session for session in sessions}
        for session in found.values():
            wanted = self._candidates(session.key)
            fitting = [history for history in wanted if len(history) == session.num_tokens]
            lengths = [len(history) for history in wanted]
            demand(fitting, f"{session.key} holds {session.num_tokens} tokens after a crash, not one of {lengths}")
            if not all(history.is_like(fitting[0]) for history in fitting):
                state = state_of(session.key)
                fitting = [history for history in fitting if history.stored == state]
                demand(fitting, f"{session.key} holds another history than it may after a crash")
            self.unsure[session.key] = fitting[:1]
        if not self.lazy:
            lost = [key for key in self.by_key if key not in found]
            demand(not lost, f"acknowledged and lost in a crash: {lost}")
        histories = {key: self.unsure[key][0] for key in found}
        for forgotten in (self.turns, self.of, self.by_key, self.unsure, self.borders):
            forgotten.clear()
        for key, session in found.items():
            self.keep(session, histories[key])

    def _candidates(self, key: SessionKey) -> list[History]:
        wanted = self._beginnings(key)
        for turn in self.turns.values():
            may_be_there = not turn.told or (turn.session.deleted and not turn.gone)
            if turn.session.key == key and may_be_there:
                wanted.append(turn.before + turn.tokens)
        return wanted + self.unsure.get(key, [])

    def _beginnings(self, key: SessionKey) -> list[History]:
        """A name's history, and what a crash may leave of it with durability "lazy"."""
        known = self.by_key.get(key)
        if known is None:
            return []
        return [known, *(known[:length] for length in self.borders.get(key, []) if self.lazy)]

    def reopen(self, sessions: Iterable[Session]) -> None:
        """After an orderly end: everything is there and nothing else."""
        found = {session.key: session for session in sessions}
        known = {key: len(history) for key, history in self.by_key.items()}
        stored = {key: session.num_tokens for key, session in found.items()}
        demand(
            stored == known,
            f"after a restart {dict(stored.items() - known.items())}, not {dict(known.items() - stored.items())}",
        )
        self.of = {session: self.by_key[key] for key, session in found.items()}
        self.turns.clear()
