"""A file call of a service fails: acknowledged turns stay, errors are described, the next request works."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from test.conftest import IS_LONG
from test.failing_calls import FailingCalls, environment
from test.serving import Service

TURN = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
NUMBERS = range(1, 120) if IS_LONG else (1, 3, 6, 10, 15, 21, 28, 36, 45, 60)


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, FailingCalls]]:
    """A service whose file calls in its data folder can fail."""
    work = tmp_path_factory.mktemp("work")
    data = work / "data"
    data.mkdir()
    variables = environment(data, work)
    service = Service(data, "--l1-sessions=2", "--l2-sessions=2", **variables)
    try:
        yield service.wait_ready(), FailingCalls(work / "control")
    finally:
        service.close()


def test_a_failed_file_call_loses_nothing(failing: tuple[Service, FailingCalls]) -> None:
    service, calls = failing
    refused, acknowledged = 0, {}
    for number in NUMBERS:
        names = [f"n{number}", f"n{number}-other", *([] if not acknowledged else [next(iter(acknowledged))])]
        calls.arm(number, 2)
        for name in names:
            answer = service.post("/state/chat/completions", {**TURN, "session_id": name, "contents": ["User: one"]})
            if answer.status_code == 200:
                acknowledged[name] = answer.json()
            else:
                refused += 1
                assert answer.status_code >= 500 and len(answer.json()["error"]) > 20, answer.text
        exported = service.get("/state/export", params={"session_id": names[0]})
        assert exported.status_code in (200, 404, 500, 503), exported.text
        calls.disarm()
        for name in acknowledged:
            assert service.get("/state/export", params={"session_id": name}).status_code == 200, name
        answer = service.post("/state/chat/completions", {**TURN, "session_id": names[0], "contents": ["User: two"]})
        assert answer.status_code == 200, answer.text
        acknowledged[names[0]] = answer.json()
    assert service.status()["pool"]["quarantined_count"] == 0
    assert service.wait_idle()
    assert refused, "the calls that failed were not those of a turn"
