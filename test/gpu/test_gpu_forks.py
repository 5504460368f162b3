"""A forked engine uses the GPU. Its parent process has torch imported."""

from __future__ import annotations

from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest
import torch

from programs.serve.child import Child
from programs.serve.engines import PRELOAD_MODULE
from programs.serve.fork_context import ForkedContext
from test.harness import call, make_request, run, started_engine, tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
START_S = 120.0


def answer(model: str, name: str, pipe: Connection) -> None:
    """Main function of the process: starts an engine on the GPU and sends a row's text."""
    with started_engine(Path(model), devices=("cuda:0",), max_running=4) as engine:
        pipe.send(
            (
                "said",
                (run(engine, make_request("abc", ignore_eos=True)).all_texts, call(engine, "status")["decode_graphs"]),
            )
        )


def test_a_forked_engine_gives_the_same_text(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    context = ForkedContext(PRELOAD_MODULE)
    forks = [Child(name, context, answer, (str(model),)) for name in ("one", "two")]
    said = []
    for fork in forks:
        fork.start()
        while fork.is_alive and not (heard := list(fork.messages())):
            assert wait(fork.waitables, START_S), "the engine did not start"
        said += [value for _, value in heard]
        assert fork.reap() == "exit code 0"
    assert said[0] == said[1] and said[0][1] == "used"
