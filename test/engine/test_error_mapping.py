"""Translation of exceptions into ServiceError."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from rwkv_batch.core.error_mapping import (
    as_service_error,
    describe_error,
    draining_error,
    engine_lost_error,
    error_translator,
    grammar_failure,
    out_of_memory_error,
)
from rwkv_batch.errors import MAY_BE_KEPT, ErrorInfo, ErrorKind, ServiceError
from sampling.grammar.constraint import Constraint, Form, GrammarError, NoTokenLeftError
from sampling.params import SamplingParams
from state_pool.errors import (
    AdapterMismatch,
    AdapterNotFound,
    DatabaseTimeout,
    DialogueNotFound,
    DirectoryUnreachable,
    InvalidSessionId,
    NameTaken,
    OriginMismatch,
    PoolError,
    PoolFull,
    SessionBusy,
    SessionNotFound,
    SessionReadFailed,
    SessionTooLarge,
    SessionUnusable,
    StaleEpoch,
    StateNotFound,
    TurnInDoubt,
    TurnNotStored,
)
from state_pool.session_file import InvalidSessionFile
from state_pool.session_key import owned_id
from test.harness import make_request


def test_a_failure_of_a_request_names_its_field() -> None:
    info = error_translator("the file could not be read", {InvalidSessionFile: "body"})(
        InvalidSessionFile("is no session")
    ).info
    assert (info.kind, info.field, info.message) == (ErrorKind.INVALID_FIELD, "body", "body: is no session")


def test_failures_of_the_pool_keep_their_kind() -> None:
    info = error_translator("the state could not be loaded")(NameTaken("a state", "poet")).info
    assert (info.kind, info.field) == (ErrorKind.NAME_TAKEN, "name")


@pytest.mark.parametrize(
    ("error", "kind", "field", "given", "retry_s"),
    [
        (SessionBusy("b"), ErrorKind.SESSION_BUSY, "session_id", "s", None),
        (StaleEpoch("b"), ErrorKind.SESSION_BUSY, "session_id", "s", None),
        (SessionNotFound("n", "x"), ErrorKind.SESSION_NOT_FOUND, "session_id", "x", None),
        (DialogueNotFound("s", 3), ErrorKind.SESSION_NOT_FOUND, "dialogue_idx", 3, None),
        (InvalidSessionId("i"), ErrorKind.INVALID_FIELD, "session_id", "s", None),
        (SessionUnusable("u"), ErrorKind.SESSION_UNUSABLE, "session_id", "s", None),
        (SessionReadFailed("r"), ErrorKind.ENGINE_LOST, "session_id", "s", 2.0),
        (DirectoryUnreachable("d"), ErrorKind.ENGINE_LOST, "session_id", "s", 2.0),
        (PoolFull("f"), ErrorKind.OVERLOADED, "session_id", "s", None),
        (DatabaseTimeout("t"), ErrorKind.TIMEOUT, "session_id", "s", None),
        (SessionTooLarge("l"), ErrorKind.BODY_TOO_LARGE, "session_id", "s", None),
        (StateNotFound("n", "poet"), ErrorKind.STATE_NOT_FOUND, "state", "poet", None),
        (OriginMismatch("o"), ErrorKind.INVALID_FIELD, "state", None, None),
        (AdapterNotFound("a"), ErrorKind.ADAPTER_NOT_FOUND, "adapter", None, None),
        (AdapterMismatch("a", "x"), ErrorKind.INVALID_FIELD, "adapter", "x", None),
        (NameTaken("a state", "poet"), ErrorKind.NAME_TAKEN, "name", "poet", None),
        (TurnNotStored("t"), ErrorKind.INTERNAL, "session_id", "s", None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_each_failure_of_the_pool_has_its_kind_and_field(
    error: PoolError, kind: ErrorKind, field: str, given: object, retry_s: float | None
) -> None:
    info = as_service_error(error, given="s").info
    assert (info.kind, info.field, info.given, info.message) == (kind, field, given, str(error))
    if retry_s is not None:
        assert info.retry_after_s == retry_s
    assert error_translator("it failed")(error).info == as_service_error(error).info


def test_a_turn_in_doubt_says_that_it_may_be_kept() -> None:
    info = as_service_error(TurnInDoubt("the connection broke")).info
    assert (info.kind, info.message) == (ErrorKind.ENGINE_LOST, f"the connection broke; {MAY_BE_KEPT}")


def test_clients_do_not_see_the_owner_of_an_id() -> None:
    stored = owned_id("key", "chat")
    info = as_service_error(SessionBusy(f"session {stored!r} is busy"), given=stored).info
    assert (info.message, info.given) == ("session 'chat' is busy", "chat")


def test_a_bug_of_the_pool_is_internal() -> None:
    info = as_service_error(KeyError("slot"), "name", 3).info
    assert (info.kind, info.field, info.given) == (ErrorKind.INTERNAL, "name", 3)
    assert info.message == "the state pool failed (KeyError: 'slot'); the server's log says more"
    assert [describe_error(error) for error in (KeyError("slot"), MemoryError())] == ["KeyError: 'slot'", "MemoryError"]


def test_errors_say_what_to_do() -> None:
    memory = out_of_memory_error(3, 40)
    assert (memory.kind, memory.retry_after_s, memory.message) == (
        ErrorKind.OVERLOADED,
        5,
        "out of device memory: a step of 3 rows and 40 tokens did not fit; retry in 5 s, send fewer rows at once, or "
        "lower prefill_tokens_per_step",
    )
    draining = draining_error().info
    assert (draining.kind, draining.retry_after_s, draining.message) == (
        ErrorKind.DRAINING,
        5,
        "the service is shutting down and accepts no new requests; retry in 5 s",
    )
    assert engine_lost_error("it is gone") == ErrorInfo(kind=ErrorKind.ENGINE_LOST, message="it is gone")


def test_a_grammar_that_cannot_continue_names_what_is_to_blame() -> None:
    def failure(error: GrammarError, field: str = "regex", **fields: Any) -> ErrorInfo:
        constraint = Constraint(form=Form.REGEX, source="a", field=field)
        return grammar_failure(make_request([1], constraint=constraint, **fields), error)

    left, banned = NoTokenLeftError("no token is left"), float("-inf")
    assert failure(left) == ErrorInfo(kind=ErrorKind.INVALID_FIELD, message="regex: no token is left", field="regex")
    assert failure(left, field="").field == "regex", "without a field of the request its form is named"
    two = SamplingParams(logit_bias={5: banned, 6: 1.0, 7: banned, 0: banned})
    assert failure(left, sampling=two).message.startswith("logit_bias: it bans 3 tokens, and with them every token")
    named = failure(left, sampling=two, ignore_eos=True)
    assert (named.field, named.message) == (
        "logit_bias",
        "logit_bias: it bans 2 tokens, and with them every token that regex allows next; ban fewer",
    )
    only_end = SamplingParams(logit_bias={0: banned})
    assert failure(left, sampling=only_end, ignore_eos=True).field == "regex"
    assert failure(GrammarError("too deep"), sampling=two).field == "regex"


def test_a_service_error_is_not_changed() -> None:
    error = ServiceError(ErrorKind.DRAINING, "stopping")
    assert error_translator("the state could not be loaded", {ServiceError: "file"})(error) is error


def test_an_internal_error_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        info = error_translator("the state could not be loaded")(KeyError("emb")).info
    assert info.kind is ErrorKind.INTERNAL
    assert info.message == "the state could not be loaded: KeyError: 'emb'"
    assert caplog.records[0].exc_info is not None and "the state could not be loaded" in caplog.text
