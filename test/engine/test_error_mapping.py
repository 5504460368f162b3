"""Translation of exceptions into ServiceError."""

from __future__ import annotations

import logging

import pytest

from rwkv_batch.core.error_mapping import error_translator
from rwkv_batch.errors import ErrorKind, ServiceError
from state_pool.errors import NameTaken
from state_pool.session_file import InvalidSessionFile


def test_a_failure_of_a_request_names_its_field() -> None:
    info = error_translator("the file could not be read", {InvalidSessionFile: "body"})(
        InvalidSessionFile("is no session")
    ).info
    assert (info.kind, info.field, info.message) == (ErrorKind.INVALID_FIELD, "body", "body: is no session")


def test_failures_of_the_pool_keep_their_kind() -> None:
    info = error_translator("the state could not be loaded")(NameTaken("a state", "poet")).info
    assert (info.kind, info.field) == (ErrorKind.NAME_TAKEN, "name")


def test_a_service_error_is_not_changed() -> None:
    error = ServiceError(ErrorKind.DRAINING, "stopping")
    assert error_translator("the state could not be loaded", {ServiceError: "file"})(error) is error


def test_an_internal_error_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        info = error_translator("the state could not be loaded")(KeyError("emb")).info
    assert info.kind is ErrorKind.INTERNAL
    assert info.message == "the state could not be loaded: KeyError: 'emb'"
    assert caplog.records[0].exc_info is not None and "the state could not be loaded" in caplog.text
