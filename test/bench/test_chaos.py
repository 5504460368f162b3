"""bench.chaos: clients with failed answers, growth of memory, and the checker of linear histories."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import httpx
import pytest

from bench.chaos.health import FLAT, FLAT_COUNT, FLAT_THREADS, slope
from bench.chaos.history import Operation, faults, run
from bench.chaos.reloads import Administrator, Files
from bench.chaos.service import Disturbances
from bench.chaos.traffic import Client, Conversation, Findings, Turn, send_turn
from test.serving import Service


def client_with_answer(status: int, body: object) -> httpx.Client:
    return httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(status, json=body)))


@pytest.mark.parametrize("status", [200, 503])
def test_a_failed_turn_has_no_text_with_any_status(status: int) -> None:
    """A late failure follows a status 200."""
    turn = Turn("User: a\n\nAssistant:", 1)
    with pytest.raises(httpx.HTTPStatusError) as failed:
        send_turn(
            client_with_answer(status, {"error": "the engine was lost"}),
            "http://t",
            Conversation("s", False),
            turn,
            "s",
        )
    assert failed.value.response.status_code == status
    assert turn.text is None


def test_a_failing_client_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a client could stop unnoticed."""

    def breaks(client: object) -> None:
        raise KeyError("usage")

    findings, gate = Findings(), threading.Event()
    gate.set()
    client = Client("http://t", 0, Disturbances("http://t"), findings, gate)
    monkeypatch.setattr(client, "_one", breaks)
    with pytest.raises(KeyError):
        client.run()
    assert findings.unexplained == ["client: ended KeyError('usage')"]
    assert client.is_waiting.is_set()


@pytest.mark.parametrize(("status", "num_requests"), [("ready", 3), ("loading", 1), ("failed", 1)])
def test_a_model_is_used_when_it_is_ready(status: str, num_requests: int) -> None:
    """A slow machine answers 200 with `loading` after the time that the request waits."""
    paths: list[str] = []
    findings = Findings()

    def answer(request: httpx.Request) -> httpx.Response:
        paths.append(request.url.path)
        return httpx.Response(200, json={"status": status})

    files: Files = object.__new__(Files)  # no models on the disk
    administrator = Administrator(
        "http://t", 0, Disturbances("http://t"), findings, threading.Event(), supervisor=0, files=files
    )
    administrator._reload_model(httpx.Client(base_url="http://t", transport=httpx.MockTransport(answer)))
    assert len(paths) == num_requests and len(findings.unexplained) == (status == "failed")


MIB = 1 << 20


def memory(an_hour: float, seconds: int = 2400, noise: float = 0.002, seed: int = 1) -> list[tuple[float, float]]:
    """Return one sample per second of a 300 MiB process. The samples have noise and occasional bursts."""
    rng = random.Random(seed)
    samples = []
    for i in range(seconds):
        burst = 0.2 if rng.random() < 0.02 else 0.0
        samples.append((float(i), 300 * MIB * (1 + an_hour * i / 3600 + rng.gauss(0, noise) + burst)))
    return samples


@pytest.mark.parametrize("an_hour", [0.0, 0.005, 0.02, 0.05])
def test_growth_is_found_despite_noise_and_bursts(an_hour: float) -> None:
    for seed in range(20):
        found = slope(memory(an_hour, seed=seed))
        assert found is not None
        assert found.low <= found.an_hour <= found.high
        assert found.grows == (an_hour > FLAT), found
        assert abs(found.an_hour - an_hour) < 0.005


def test_a_single_step_is_not_growth() -> None:
    """A table that doubles once does not grow for ever."""
    found = slope([(float(i), 300.0 * MIB if i < 200 else 300.3 * MIB) for i in range(2400)])
    assert found is not None and not found.grows


def test_a_short_run_needs_a_significant_slope() -> None:
    found = slope(memory(0.012, seconds=120))
    assert found is not None and not found.grows
    found = slope(memory(0.5, seconds=120, noise=0.0005))
    assert found is not None and found.grows


@pytest.mark.parametrize("left_an_hour", [0, 12])
def test_files_that_come_and_go_are_flat_unless_some_stay(left_an_hour: int) -> None:
    """Busy clients have up to seven files for a while. The medians of such numbers grew by a third in an hour."""
    rng = random.Random(1)
    samples = [(2.0 * i, 20.0 + int(i * left_an_hour / 1800) + rng.choice((0, 0, 1, 4, 7))) for i in range(1350)]
    found = slope(samples, FLAT_COUNT)
    assert found is not None and found.grows == (left_an_hour > 0)


@pytest.mark.parametrize(("left_an_hour", "grows"), [(0, False), (1, False), (4, True)])
def test_one_descriptor_more_is_no_leak(left_an_hour: int, grows: bool) -> None:
    """One of thirty descriptors is 3 % of them, which a bound on the share took for growth."""
    rng = random.Random(2)
    samples = [(2.0 * i, 30.0 + int(i * left_an_hour / 1800) + rng.choice((0,) * 40 + (1, 4))) for i in range(1350)]
    samples = [(at, count + (at > 1500)) for at, count in samples]
    found = slope(samples, FLAT_COUNT)
    assert found is not None and found.grows == grows, found


@pytest.mark.parametrize(("more", "grows"), [(FLAT_THREADS - 3, False), (2 * FLAT_THREADS, True)])
def test_a_pool_of_threads_that_fills_is_no_leak(more: float, grows: bool) -> None:
    samples = [(2.0 * i, 30.0 + int(i * more / 1350)) for i in range(1350)]
    found = slope(samples, FLAT_THREADS)
    assert found is not None and found.grows == grows, found


def test_too_few_samples_give_no_slope() -> None:
    assert slope(memory(0.5, seconds=30)) is None


def turns(*places: int | None) -> list[Operation]:
    """Turns after each other."""
    return [Operation(2 * i, 2 * i + 1, place) for i, place in enumerate(places)]


@pytest.mark.parametrize(
    "history",
    [
        [],
        turns(0, 1, 2),
        turns(0, None, 1),
        turns(0, None, 2),
        turns(0, None, None, 2, None),
        [Operation(0, 9, 1), Operation(1, 8, 0)],
        [Operation(0, 9, None), Operation(1, 2, 1), Operation(3, 4, 2), Operation(0, 1, 0)],
    ],
    ids=str,
)
def test_linear_histories(history: list[Operation]) -> None:
    assert faults(history) == []


@pytest.mark.parametrize(
    ("history", "what"),
    [
        (turns(0, 0), "two turns"),
        (turns(0, 1, 1), "two turns"),
        (turns(1, 0), "after place 1"),
        (turns(0, 2), "place 1 belongs to no request"),
        (turns(0, 2, None), "place 1 belongs to no request"),
        (turns(0, None, 3), "belongs to no request"),
        ([*turns(0, 1, 2), Operation(10, 11, 1)], "two turns"),
        ([*turns(0, 3, None, None), Operation(20, 21, 2)], "after place 3"),
        (turns(-1), "after place -1"),
    ],
    ids=str,
)
def test_lost_doubled_and_reordered_turns_are_found(history: list[Operation], what: str) -> None:
    assert any(what in fault for fault in faults(history))


def test_turns_of_two_engines_with_kills_are_linear(tiny_model: Path, tmp_path: Path) -> None:
    with Service(tmp_path, "--model-path", str(tiny_model), "--replicas", "2", "--threads", "1") as service:
        found = run(service, operations=160, clients=8, sessions=3, kill_every=60, seed=2)
    assert found["wrong_sessions"] == 0, found["faults"]
    assert found["kills"] and found["answered"] > 80
