"""Drafters guess a row's next tokens. A step then verifies them (`core/speculation.py`). No torch.

The length of a draft depends on what the row accepted so far (`RowDrafter`).
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

from state_pool.sessions import Lease, Session

MAX_ROWS = 32
"""Maximum rows of a step that verifies drafts."""
MAX_DRAFT_TOKENS = 16
"""Tokens of a draft at most."""
MATCHES = (4, 2)
"""Lengths of the n-grams that a lookup finds, longest first."""
MAX_LOOKUP_TOKENS = 16384
"""Latest tokens of a text that a lookup searches."""
TOKENS_PER_CALL = 512
"""Tokens that a lookup adds to its index at a time, so that long prompts delay no step."""
MAX_MISSES = 2
"""Wrong tokens in a row after which a lookup gives up its place in the text."""


class Drafter(Protocol):
    """Guesses the tokens after a text."""

    name: str

    def propose(self, ids: Sequence[int], length: int, count: int) -> list[int]:
        """Return up to `count` tokens that may follow ids[:length].

        The text of each call begins with the text of the call before.
        """


class Joined(Sequence[int]):
    """Two token lists as one, without a copy."""

    def __init__(self, head: Sequence[int], tail: Sequence[int]) -> None:
        self._head, self._tail = head, tail

    def __len__(self) -> int:
        return len(self._head) + len(self._tail)

    def __getitem__(self, index: Any) -> Any:
        size = len(self._head)
        if not isinstance(index, slice):
            return self._head[index] if index < size else self._tail[index - size]
        start, stop = index.start, index.stop
        return [*self._head[start:stop], *self._tail[max(start - size, 0) : max(stop - size, 0)]]


class LookupDrafter:
    """Finds the last tokens of the text in a source, and proposes the tokens that follow there.

    The source is the text itself after that of its session, or another text. While tokens match, the drafter keeps its
    place in the source. It also keeps it over MAX_MISSES wrong tokens: a text may repeat the source with a word
    replaced.
    """

    def __init__(self, name: str, source: list[int] | None = None, start: int = 0, session: Sequence[int] = ()) -> None:
        """source: None: the text itself, after `session`. start: length of the text at which another source begins"""
        self.name = name
        self._source: Sequence[int] | None = source
        self._session = session
        self._ends: list[dict[tuple[int, ...], int]] = [{} for _ in MATCHES]
        """by length in MATCHES: n-gram -> index after its latest occurrence in the source"""
        self._older_ends: list[dict[tuple[int, ...], int]] = [{} for _ in MATCHES]
        """the same, of the MAX_LOOKUP_TOKENS before; those before are forgotten"""
        self._indexed = 0
        self._length = start
        """of the text at the last call"""
        self._place = None if source is None else 0
        """index in the source of the token expected next"""
        self._misses = 0

    def propose(self, ids: Sequence[int], length: int, count: int) -> list[int]:
        """See Drafter."""
        source, end = self._source, len(self._session) + length
        if source is None:
            source = Joined(self._session, ids) if self._session else ids
        else:
            end = len(source)
        # The n-gram at the end of the text itself is not indexed: nothing follows it yet.
        self._index(source, end - (self._source is None))
        self._find_place(ids, length, source, end)
        place = self._place
        if place is None or place >= end:
            return []
        if self._source is None:  # a text that repeats itself continues in circles
            period = end - place
            return [source[place + i % period] for i in range(count)]
        return list(source[place : place + count])

    def _index(self, source: Sequence[int], end: int) -> None:
        if len(self._ends[0]) >= MAX_LOOKUP_TOKENS:
            self._ends, self._older_ends = [{} for _ in MATCHES], self._ends
        begin = max(self._indexed, end - MAX_LOOKUP_TOKENS)
        self._indexed = min(end, begin + TOKENS_PER_CALL)
        for number, ends in zip(MATCHES, self._ends, strict=True):
            first = max(begin + 1 - number, 0)
            tokens = source[first : self._indexed]
            ngrams = zip(*(tokens[i:] for i in range(number)), strict=False)
            ends.update(zip(ngrams, range(first + number, self._indexed + 1), strict=True))

    def _find_place(self, ids: Sequence[int], length: int, source: Sequence[int], end: int) -> None:
        if self._place is not None:
            self._place += length - self._length
        self._length = length
        place, shortest = self._place, MATCHES[-1]
        if place is not None and shortest <= place < end:
            if list(source[place - shortest : place]) == list(ids[length - shortest : length]):
                self._misses = 0
                return
        elif place == 0:
            return
        for number, ends, older in zip(MATCHES, self._ends, self._older_ends, strict=True):
            ngram = tuple(ids[length - number : length])
            if (found := ends.get(ngram, older.get(ngram))) is not None:
                self._place, self._misses = found, 0
                return
        self._misses += 1
        if place is None or place >= end or self._misses > MAX_MISSES:
            self._place = None


MAX_SESSION_TOKENS = 4096
"""Latest tokens of a session in which its next turn looks."""
MAX_SESSION_TEXTS = 256
"""Sessions whose tokens are kept, the latest ones: 4 MB."""


class SessionTexts:
    """The latest tokens of sessions: a turn may repeat a former one. They go when a session goes."""

    def __init__(self) -> None:
        self._texts: weakref.WeakKeyDictionary[Session, array[int]] = weakref.WeakKeyDictionary()

    def before(self, lease: Lease | None) -> Sequence[int]:
        """Return the tokens before a turn."""
        source = None if lease is None else lease.source
        return () if source is None else self._texts.get(source, ())

    def add(self, lease: Lease, tokens: list[int]) -> None:
        """Add a turn's tokens to its session's."""
        text = array("i", [*self.before(lease), *tokens][-MAX_SESSION_TOKENS:])
        self._texts.pop(lease.session, None)
        self._texts[lease.session] = text
        if len(self._texts) > MAX_SESSION_TEXTS:
            self._texts.pop(next(iter(self._texts)))


MAX_CONTEXT = 1024
"""Latest tokens of a text that a draft model reads."""
CHUNK = 128
"""Tokens of them per step, so that long prompts delay no step."""
RING = MAX_DRAFT_TOKENS + 2
"""Positions of a row whose states a draft model keeps. So it reads no token again when drafts are rejected."""


class ModelDrafter:
    """A row's place in a draft model, which guesses for all rows of a step at once (`DraftModel`).

    It has the states after `num_read` tokens and after each guess but the last.
    """

    def __init__(self) -> None:
        self.name = "model"
        self.num_read = 0
        self.guesses: list[int] = []
        """zeros until `read`"""
        self.pending: Guesses | None = None
        """the model may not have finished `guesses`"""
        self.places = range(0)
        """of `guesses` in the tokens of `pending`"""

    def expect(self, count: int, pending: Guesses, places: range) -> None:
        """Receive `count` guesses that the device may not have finished. places: in `pending`, at least as many"""
        self.guesses, self.pending, self.places = [0] * count, pending, places

    def read(self) -> None:
        """Fill in `guesses`. Waits for the device."""
        if self.pending is not None:
            tokens, self.pending = self.pending.read(), None
            self.guesses[:] = [tokens[i] for i in self.places[: len(self.guesses)]]

    def propose(self, ids: Sequence[int], length: int, count: int) -> list[int]:
        """Return the guesses of the last `DraftModel.guess` for this text."""
        return self.guesses[:count] if length == self.num_read else []

    def next_read(self, ids: Sequence[int], length: int) -> tuple[int, list[int]]:
        """Return the position in ids[:length] to continue from, and the next tokens to read. They may be a part.

        0: the zero state, even if the tokens begin later in the text.
        """
        position = self.num_read
        self.read()  # if no step verified them
        for guess in self.guesses[:-1]:
            if position + 1 >= length or ids[position] != guess:
                break
            position += 1
        begin = position or max(0, length - MAX_CONTEXT)
        tokens = list(ids[begin : min(length, begin + CHUNK)])
        self.num_read, self.guesses = begin + len(tokens), []
        return position, tokens


class Wanted(NamedTuple):
    """A row for which a draft model guesses."""

    drafter: ModelDrafter
    ids: Sequence[int]
    length: int
    num_tokens: int


class Guesses(Protocol):
    """The guesses of one call, which the device may not have finished.

    Drafters refer to it, not the other way: a row's drafter must go with its row, and free its place in the model.
    """

    seconds: float
    """from the call to the first `read`"""
    num_steps: int
    """of the model"""

    def read(self) -> list[int]:
        """Return the tokens of all rows. Waits for the device."""


class DraftModel(Protocol):
    """A model that guesses the next tokens of many rows in one call."""

    def guess(self, wanted: list[Wanted]) -> Guesses | None:
        """Set `ModelDrafter.guesses` of rows whose texts it has read. They are zeros until `ModelDrafter.read`.

        None: there are no such rows. Does not wait for the device.
        """

    def graph_s(self, num_rows: int) -> float:
        """Return the seconds of a graph that guesses a token for each row. 0: no graph does."""


PRIOR_TRIALS, MODEL_TRIALS = 5.0, 16.0
"""Tokens that the acceptance of all rows counts for in a row's own: that of lookups depends most on the text."""
MAX_TRIALS = 4
"""First tokens of a draft that count in it: a long right one must not outweigh ten wrong ones."""
MEMORY, POOL_MEMORY, FADING = 0.97, 0.999, 0.995
"""Weight of a row's older drafts, of those of all rows, and of both at each step: texts change."""


@dataclass(slots=True)
class Acceptance:
    """Drafted tokens that were accepted, and drafts with a wrong one: tokens after it say nothing."""

    accepted: float = 3.0
    rejected: float = 2.0

    @property
    def rate(self) -> float:
        """The chance that a drafted token is accepted if those before it are."""
        return self.accepted / (self.accepted + self.rejected)

    def fade(self, memory: float) -> None:
        """Count older drafts less."""
        self.accepted *= memory
        self.rejected *= memory


@dataclass(slots=True, eq=False)
class RowDrafter:
    """A row's drafter, and how many of its tokens the row accepted."""

    drafter: Drafter
    pool: Acceptance
    """of all rows with such a drafter"""
    num_drafted: int = 0
    num_accepted: int = 0
    _recent: Acceptance = field(default_factory=partial(Acceptance, 0.0, 0.0))

    @property
    def name(self) -> str:
        return self.drafter.name

    @property
    def rate(self) -> float:
        """The expected chance that a drafted token is accepted."""
        accepted, rejected = self._recent.accepted, self._recent.rejected
        trials = MODEL_TRIALS if isinstance(self.drafter, ModelDrafter) else PRIOR_TRIALS
        return (accepted + trials * self.pool.rate) / (accepted + rejected + trials)

    def fade(self) -> None:
        """Count older drafts less. Called before each step."""
        self._recent.fade(FADING)

    def record(self, draft: Draft) -> None:
        """Count a verified draft."""
        num_tokens, num_accepted = len(draft.tokens), draft.num_accepted
        self.num_drafted += num_tokens
        self.num_accepted += num_accepted
        trials = min(num_tokens, MAX_TRIALS)
        for one, memory in ((self._recent, MEMORY), (self.pool, POOL_MEMORY)):
            one.fade(memory)
            one.accepted += min(num_accepted, trials)
            one.rejected += num_accepted < trials


@dataclass(slots=True)
class Draft:
    """A row's drafted tokens in a launched step."""

    drafter: RowDrafter
    tokens: list[int]
    start: int
    """index of the first drafted token in `Sequence.token_ids`"""
    num_wanted: int = 0
    """tokens that a draft model has to guess; 0: `tokens` are known"""
    num_next: int = 0
    """tokens to guess for the next step as soon as this one's are known. 0: the next step probably has no draft"""
    slots: list[int] = field(default_factory=list)
    """the states after each drafted token"""
    first_logit: int = 0
    """index in `InFlightStep.draft_logits` of the logits after the first drafted token"""
    num_accepted: int = 0
    sampled: list[int] = field(default_factory=list)
    """the tokens after each drafted one, sampled as if all before were accepted; []: they are sampled one by one"""
    accepted: list[int] = field(default_factory=list)
    """of `sampled`, those after accepted tokens"""

    def read_guesses(self) -> None:
        """Fill in `tokens` if a draft model guesses them. Waits for it."""
        drafter = self.drafter.drafter
        if isinstance(drafter, ModelDrafter):
            drafter.read()
            self.tokens[:] = drafter.guesses[: len(self.tokens)]

    def accepts(self, ids: Sequence[int]) -> bool:
        """Return whether the row's tokens agree with the draft, and the next one is sampled from its logits."""
        count = len(ids) - self.start
        return (
            not self.sampled
            and self.num_accepted < count <= len(self.tokens)
            and list(ids[self.start :]) == self.tokens[:count]
        )

    def accept_ahead(self, last: int) -> None:
        """Fill in `accepted`. last: the sampled token that the first drafted one guesses"""
        count = 0
        for drafted, token in zip(self.tokens, self.sampled, strict=False):
            if drafted != last:
                break
            count, last = count + 1, token
        self.accepted = self.sampled[:count]


class DraftTotals(NamedTuple):
    """A drafter's tokens since the start."""

    drafted: int = 0
    accepted: int = 0
