"""A test of the test setup: pytest iterates the loggers before each test."""

from __future__ import annotations

import logging


def test_a_logger_may_be_made_while_they_are_walked() -> None:
    logging.getLogger("walked")
    for _ in logging.Logger.manager.loggerDict.values():
        logging.getLogger("made while they are walked")
