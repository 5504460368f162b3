"""What ends a measurement of two engines before it begins."""

from __future__ import annotations

import contextlib
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import pair


def test_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of another service are none of this one's."""

    @contextlib.contextmanager
    def service(*_: Any) -> Iterator[str]:
        with contextlib.ExitStack() as stack:
            for name in ("rwkv-1", "rwkv-2"):
                (tmp_path / name).mkdir()
                server = socket.create_server(str(tmp_path / name / "engine-0"), family=socket.AF_UNIX)
                stack.enter_context(server)
            yield ""

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(pair, "service", service)
    monkeypatch.setattr(pair, "Engines", lambda url: SimpleNamespace(wait_ready=lambda: None))
    with pytest.raises(SystemExit, match="2 engines have come, not 1"), pair.running(1, [], tmp_path / "log"):
        pass
