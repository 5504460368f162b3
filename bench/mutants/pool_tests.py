"""Tests of the state pool that see its mutants."""

from __future__ import annotations

WORLDS = "test/simulation/test_simulation.py"
SINGLE_WORLDS = f"{WORLDS}::test_worlds_that_found_something"
FIRST_WORLDS = f"{WORLDS}::test_worlds[0]"
BETWEEN = "test/state_pool/test_pool_between.py"
DAMAGED = "test/state_pool/test_pool_damaged.py"
DIALOGUES = "test/state_pool/test_pool_dialogues.py"
DISK = "test/state_pool/test_pool_disk_effects.py"
EFFECTS = "test/state_pool/test_pool_effects.py"
FAILING_DISK = "test/state_pool/test_pool_failing_disk.py"
KILLED = "test/state_pool/test_pool_killed.py"
MODEL = "test/state_pool/test_pool_model.py"
PORTABLE = "test/state_pool/test_pool_portable.py"
PREFIX = "test/state_pool/test_pool_prefix.py"
REFUSED = "test/state_pool/test_pool_refused.py"
SESSIONS = "test/state_pool/test_pool_sessions.py"
SHARED = "test/state_pool/test_pool_shared.py"
FAULTS = (DAMAGED, REFUSED, FAILING_DISK, DISK)
