"""The product's classes that a world checks at every call."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from rwkv_batch.core.job_table import JobTable
from rwkv_batch.core.scheduler import Scheduler
from rwkv_batch.core.sequence import Sequence
from rwkv_batch.core.speculation import Speculation, make_drafters
from rwkv_batch.core.state_manager import StateManager
from rwkv_batch.engine import Engine
from state_pool.cache.slots import DraftSlots
from state_pool.errors import SessionReadFailed
from state_pool.pool import StatePool
from state_pool.session_key import SessionKey
from state_pool.sessions import Session
from state_pool.turns.import_export import FittedFile
from test.simulation.device import ALPHABET, TOKENIZER, Runner, fold, read_slots
from test.simulation.history import History
from test.simulation.violation import demand

if TYPE_CHECKING:
    from test.simulation.world import World


class CheckedStateManager(StateManager):
    """The engine's state manager, checked against the ledger."""

    def __init__(self, world: World, pool: StatePool, overlap: bool) -> None:
        super().__init__(pool, TOKENIZER, overlap)
        self._world = world

    def prepare(self, sequence: Sequence) -> None:
        """A row starts from its whole history or a true prompt prefix."""
        super().prepare(sequence)
        lease, device, began = sequence.lease, self._world.device, self._world.beginning(sequence.request)
        if lease is not None:
            history = self._world.ledger.history(lease.source)
            demand(lease.exists == bool(history), f"{lease.session.key}: {lease.num_tokens} tokens, not {len(history)}")
            self._world.before[sequence] = history = history or History(began=began)
            began = history.began
            if not sequence.members:
                state = fold(device.memory[lease.read_slot], lease.replay, began.mark)
                demand(state == history.stored, f"{lease.session.key} does not hold its history")
        demand(device.mark_of(sequence) == began.mark, "a row has another adapter than it should")
        begun = History(sequence.token_ids[: sequence.num_computed_tokens], began)
        if lease is not None and lease.exists:
            read_again = sequence.turn_start - sequence.num_computed_tokens
            demand(sequence.replayed_tokens == read_again, f"{read_again} tokens of {lease.session.key} are read again")
        if lease is None or sequence.members:
            found = tuple(device.memory[slot] for slot in read_slots(sequence))
            demand(found == begun.states, f"a row begins from something else after {len(begun)} tokens")

    def record_turn(self, sequence: Sequence, acknowledge: Any) -> None:
        """The recorded tokens are the predicted answer."""
        world, ledger = self._world, self._world.ledger
        world.recording = sequence

        def reported(error: Any) -> None:
            ledger.reported(ledger.turns[sequence], error)
            acknowledge(error)

        super().record_turn(sequence, reported)

    def check_in(self, sequence: Sequence) -> None:
        """The parked state is the one after the turn."""
        turn = self._world.ledger.turns[sequence]
        expected = (turn.before + turn.tokens).stored
        if not sequence.members:  # of a mixture only the tokens are kept
            demand(self._world.device.memory[sequence.slot] == expected, f"{turn.session.key} parks a wrong state")
        super().check_in(sequence)


class CheckedPool(StatePool):
    """Reports the engine's calls to the ledger."""

    world: World

    def watch(self, world: World) -> None:
        """Report the calls from here on to the world's ledger."""
        self.world = world
        turns: Any = self.turns
        turns.record = partial(self._record, turns.record)
        turns.delete = partial(self._delete, turns.delete)
        index: Any = self._index
        index.mark_unusable = partial(self._mark_unusable, index.mark_unusable)
        import_export: Any = self.import_export
        import_export.import_session = partial(self._import_session, import_export.import_session)
        store: Any = self._store
        reader = store.reader
        reader.load = partial(self._load, reader.load)

    def _expired(self) -> list[Session]:
        expired = super()._expired() if not self.world.is_checking else []
        self.world.expired(expired, self._expiry.ttl)
        return expired

    def _mark_unusable(self, mark_unusable: Any, session: Session, reason: str) -> None:
        if "its last turns were lost" in reason:  # with durability "lazy" and a broken disk, as documented
            self.world.ledger.shortened.add(session.key)
            self.world.ledger.lost_names.add(session.key.session_id)
        mark_unusable(session, reason)

    def _load(self, load: Any, row_id: int, on_loaded: Any) -> None:
        world, began = self.world, self.world.tasks.now
        names = [session.key.session_id for session in self._index if session.row_id == row_id]

        def loaded(result: Any) -> None:
            if isinstance(result, SessionReadFailed):
                world.failed_reads.update((name, (began, world.tasks.now)) for name in names)
            on_loaded(result)

        load(row_id, loaded)

    def _record(self, record: Any, lease: Any, tokens: list[int], on_durable: Any) -> None:
        sequence = self.world.recording
        assert sequence is not None
        self.world.ledger.begin(sequence, tokens, self.world.beginning(sequence.request))
        record(lease, tokens, on_durable)

    def _import_session(self, import_session: Any, session_id: str, file: FittedFile, on_durable: Any) -> None:
        ledger, key = self.world.ledger, SessionKey(session_id)
        parts = {} if file.host is None else file.host.parts()
        state = int.from_bytes(b"".join(parts[name] for name in ("a.wkv", "a.shift") if name in parts), "little")
        carried = ledger.carried(state, file.replay)
        at = ledger.now()
        ledger.arrived.add(session_id)

        def durable(error: Exception | None) -> None:
            if error is None:
                session = self._index.get(key)
                assert session is not None
                ledger.keep(session, ledger.imported(carried, file.num_tokens), at)
            on_durable(error)

        import_session(session_id, file, durable)
        for history in carried[:1]:  # until it is reported, a crash may leave all of it, or only its stored state
            ledger.unsure.setdefault(key, []).extend([history, history[: len(history) - len(file.replay)]])

    def _delete(self, delete: Any, session_id: str, delete_prefix: bool, on_deleted: Any) -> int:
        gone = self.world.deleted(session_id, delete_prefix, list(self._index.matching(session_id, delete_prefix)))

        def durable(outcome: int | Exception) -> None:
            if not isinstance(outcome, Exception):
                self.world.ledger.deleted(gone)
            on_deleted(outcome)

        count: int = delete(session_id, delete_prefix, durable)
        return count


class Drafts:
    """Guesses a row's next tokens: right ones, up to a wrong one now and then, or none."""

    name = "world"

    def __init__(self, world: World, sequence: Sequence) -> None:
        self._world, self._sequence = world, sequence

    def propose(self, _: object, length: int, count: int) -> list[int]:
        rng = self._world.drafting
        tokens = self._world.runner.next_tokens(self._sequence, length, min(count, rng.choice((0, 1, 3, count))))
        return [token if rng.random() < 0.8 else rng.choice(ALPHABET) for token in tokens]


class CheckedEngine(Engine):
    """The real engine over a world's runner. Its thread is never started."""

    def load(self, world: World, runner: Runner) -> None:
        """Replaces loading a model."""
        self.model_runner = runner  # type: ignore[assignment]
        self.state_manager = CheckedStateManager(world, runner.pool, runner.overlaps)
        self.scheduler = Scheduler(runner.limits, self.state_manager, runner.has_pieces)
        # With "auto", drafts are planned and probed by measured times, so there are fewer of them.
        mode = ("ngram", "auto")[world.seed % 2] if world.speculates else "off"
        slots = DraftSlots(runner.pool.tiers.slots, world.num_draft_slots)
        self.speculation = Speculation(mode, slots, self.scheduler.forget_plain)
        self.speculation.make_drafters = lambda sequence: [Drafts(world, sequence), *make_drafters(sequence)]
        self.jobs = JobTable(self.scheduler, self.state_manager, self.speculation, TOKENIZER, runner.vocab)
