"""A process to be killed: runs turns, forks and deletes on a pool and journals each acknowledgement.

`python -m test.pool_child FOLDER DURABILITY SEED`. Every line of FOLDER/journal is a JSON list:
- ["try", session, parent, tokens] before a turn is recorded
- ["ack", session, dialogue, parent, tokens] once the turn is durable
- ["deleting", session] and ["deleted", session] around a delete
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from state_pool.config import PoolConfig
from state_pool.session_key import LINEAR
from state_pool.sessions import Lease, LeaseState
from test.pool_fakes import Driver, FakeArena, config_in

SESSIONS = 10
MAX_OPEN = 3


def crash_config(folder: Path, durability: str) -> PoolConfig:
    """Small tiers, so that all moves happen within a second. Uses the folder `objects` for states if it exists."""
    objects = folder / "objects"
    store = {"checkpoint_store": objects.as_uri(), "checkpoint_store_min_mb": 0.0} if objects.is_dir() else {}
    return config_in(
        folder,
        durability=durability,
        l1_sessions=2,
        l2_sessions=2,
        checkpoint_tokens=30,
        checkpoint_idle_s=0.05,
        transfer_states=2,
        **store,
    )


class Worker:
    """Runs until killed."""

    def __init__(self, folder: Path, durability: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self.journal = os.open(folder / "journal", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.driver = Driver(FakeArena(num_slots=12, delay=1), crash_config(folder, durability))
        self.pool = self.driver.pool
        self.open: list[tuple[Lease, str, int | None]] = []
        self.dialogues: dict[str, list[int]] = {}
        self.acks = 0

    def write_journal(self, *entry: Any) -> None:
        """Write one line in one write. A kill then leaves it whole or absent."""
        os.write(self.journal, (json.dumps(entry) + "\n").encode())

    def run(self, turns: int) -> None:
        """Run random work, several turns at once."""
        while self.acks < turns:
            if len(self.open) < MAX_OPEN:
                self.begin()
            self.pool.poll()
            for entry in list(self.open):
                if entry[0].state is not LeaseState.WAITING:
                    self.open.remove(entry)
                    self.finish(*entry)
            if self.rng.random() < 0.01:
                self.delete(f"s{self.rng.randrange(SESSIONS)}")

    def begin(self) -> None:
        """Check out a session, or a fork of an acknowledged dialogue."""
        name = f"s{self.rng.randrange(SESSIONS)}"
        parent = None
        if self.rng.random() < 0.3:
            parent = self.rng.choice([0, *self.dialogues.get(name, [])])
        self.open.append((self.pool.turns.checkout(name, parent), name, parent))

    def finish(self, lease: Lease, name: str, parent: int | None) -> None:
        """Run one turn and journal its acknowledgement."""
        if lease.state is LeaseState.FAILED:
            self.pool.turns.release(lease)
            return
        tokens = [self.rng.randrange(65536) for _ in range(self.rng.randrange(1, 16))]
        slot = self.driver.compute(lease, tokens)
        self.write_journal("try", name, parent, tokens)

        def durable(error: Exception | None) -> None:
            if error is None:
                self.acks += 1
                dialogue = LINEAR if lease.dialogue_idx is None else lease.dialogue_idx
                self.write_journal("ack", name, dialogue, parent, tokens)
                if parent is not None:
                    self.dialogues.setdefault(name, []).append(dialogue)

        self.pool.turns.record(lease, tokens, durable)
        self.pool.turns.checkin(lease, slot)

    def delete(self, name: str) -> None:
        self.driver.settle()
        self.write_journal("deleting", name)
        self.driver.delete(name)
        self.write_journal("deleted", name)
        self.dialogues.pop(name, None)


if __name__ == "__main__":
    worker = Worker(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    worker.write_journal("started")
    worker.run(turns=400)
    worker.pool.close()
