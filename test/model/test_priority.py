"""Work that stands behind all else on the cores."""

from __future__ import annotations

import os
import threading

import pytest

from native.priority import NICENESS, at_low_priority


def niceness() -> int:
    """Of the calling thread."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_a_thread_stands_back_and_no_other_does() -> None:
    before = niceness()
    assert at_low_priority(niceness) == min(19, before + NICENESS) and niceness() == before


def test_its_failures_are_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        at_low_priority(lambda: 1 // 0)
