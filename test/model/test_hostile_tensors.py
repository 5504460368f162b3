"""Hostile and odd tensor files: refused by name, with little memory and time; what torch writes is read as it reads."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from rwkv_batch.model import tensor_files
from rwkv_batch.model.tensor_files import FileError, metadata_of, read_tensors
from rwkv_batch.model.weights import WeightsError, weights_from
from rwkv_batch.runner.model_files import open_model
from test.harness import make_request, run, started_engine
from test.hostile_tensors import hostile_files, valid_files
from test.resource_limits import run_bounded


def refusal(path: str) -> str:
    try:
        read_tensors(Path(path))
    except FileError as error:
        return str(error)
    return ""


def refusals(folder: str) -> dict[str, str]:
    """Return the refusal of each hostile file; "" for a file that was read."""
    return {name: refusal(str(path)) for name, path in hostile_files(Path(folder))}


@pytest.mark.slow
def test_hostile_files_are_refused_and_take_little_memory(tmp_path: Path) -> None:
    cost = run_bounded(refusals, str(tmp_path), cpu_s=60, memory_mib=1024)
    assert cost.result is not None, "a file took more than the limit"
    assert [name for name, why in cost.result.items() if "model file" not in why] == []
    assert "uses 'builtins.bytearray'" in cost.result["bytearray"]
    assert all(len(why) < 1000 and "\n" not in why for why in cost.result.values())


def test_a_header_of_many_names_is_not_parsed_in_this_process(tmp_path: Path) -> None:
    """Parsing it would hold Python's lock: another thread would stand still."""
    path = next(path for name, path in hostile_files(tmp_path) if name == "a header of many names")
    read_tensors(next(valid_files(tmp_path)))  # starts the sandbox process
    started = time.thread_time()
    assert "at most 16384 are allowed" in refusal(str(path))
    assert time.thread_time() - started < 0.1, "CPU time of this thread, however busy the machine is"


def test_what_torch_writes_is_read_as_torch_reads_it(tmp_path: Path) -> None:
    for path in valid_files(tmp_path):
        found = read_tensors(path)
        if path.suffix == ".pth":
            expected = torch.load(path, weights_only=True)
            assert found.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype, name
                assert found[name].stride() == tensor.stride()
        else:
            assert found["a"].tolist() == [[0, 1, 2], [3, 4, 5]] and found["b"].dtype is torch.int64
            assert metadata_of(path) == {"about": "numbers"}


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.bool]
)
def test_every_type_and_tied_tensors(tmp_path: Path, dtype: torch.dtype) -> None:
    whole = torch.arange(12).view(3, 4).to(dtype)
    tensors = {"whole": whole, "row": whole[1], "none": whole[:0], "one": whole.new_ones(()), "tied": whole}
    torch.save({**tensors, "parameter": torch.nn.Parameter(torch.ones(2))}, tmp_path / "m.pth", pickle_protocol=4)
    found = read_tensors(tmp_path / "m.pth")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert found["parameter"].tolist() == [1, 1] and found["whole"].data_ptr() == found["tied"].data_ptr()


def test_attributes_of_parameters_are_dropped(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.arange(3.0))
    parameter.tensor_model_parallel = True  # as training programs mark them
    torch.save({"x": parameter}, tmp_path / "m.pth")
    assert torch.equal(read_tensors(tmp_path / "m.pth")["x"], torch.arange(3.0))


def test_a_sandbox_process_that_died_is_replaced(tmp_path: Path) -> None:
    path = next(valid_files(tmp_path))
    read_tensors(path)
    (sandbox,) = tensor_files._sandboxes._idle
    os.kill(sandbox._process.pid, signal.SIGKILL)
    sandbox._process.wait()
    assert set(read_tensors(path)) == {"a", "b", "c"}


def test_threads_may_read_at_the_same_time(tmp_path: Path) -> None:
    paths, found = list(valid_files(tmp_path)), []
    threads = [threading.Thread(target=lambda: found.extend(len(read_tensors(p)) for p in paths)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [2] * 4 + [3] * 4 + [4] * 4


# The vocabulary ------------------------------------------------------------------------------------------------


def padded(tensors: dict[str, torch.Tensor], rows: int) -> dict[str, torch.Tensor]:
    """Return a model with `rows` tokens; the added rows would win every greedy choice."""
    added = {name: torch.full((rows - len(tensors[name]), 64), 9.0) for name in ("emb.weight", "head.weight")}
    return tensors | {name: torch.cat([tensors[name], more.to(torch.bfloat16)]) for name, more in added.items()}


def test_rows_after_the_vocabulary_are_never_sampled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from demo.random_weights import random_weights

    plain = random_weights(1, 64)
    wide = padded(plain, 65_600)
    wide["head.weight"][65_536:] = 100 * plain["head.weight"][:64].float().abs().to(torch.bfloat16)
    torch.save(plain, tmp_path / "plain.pth")
    torch.save(wide, tmp_path / "wide.pth")
    texts = []
    for name in ("plain", "wide"):
        with started_engine(tmp_path / f"{name}.pth") as engine:
            rows = [make_request(prompt, ignore_eos=True) for prompt in ("Once", "And then", "x")]
            texts.append(run(engine, *rows).all_texts)
    assert texts[0] == texts[1]
    assert "64 rows more than the World vocabulary of 65536 tokens" in caplog.text
    assert weights_from(wide).fingerprint == weights_from(plain).fingerprint, "sessions continue"


@pytest.mark.parametrize(
    ("rows", "why"), [(50_277, "as models with the Pile vocabulary have"), (50_304, "Pile"), (9, "")]
)
def test_another_vocabulary_is_refused(tmp_path: Path, rows: int, why: str) -> None:
    from demo.random_weights import write_random_model

    path = write_random_model(tmp_path / "pile.pth", 1, 64, vocab=rows)
    with pytest.raises(WeightsError, match=f"{rows} rows of tokens.*{why}.*has 65536: use 'World' weights"):
        open_model(str(path))


def test_a_process_that_cannot_start_is_not_the_files_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(tensor_files._sandboxes, "_idle", [])
    monkeypatch.setattr("native.sandbox.subprocess.Popen", refuse)
    with pytest.raises(RuntimeError, match="no process can be started"):
        tensor_files._index(tmp_path / "model.safetensors")
