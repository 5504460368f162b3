"""Temporary folders of killed processes: the next process removes these and no others."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from native import files as private_files
from native.files import TemporaryFolder, remove_stale
from test.serving import Service, wait_for
from test.sources import ROOT

HOLDS = "from native.files import TemporaryFolder as T; print(T('{}').path, flush=True); input()"


@pytest.fixture
def temporary_root(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The parent of temporary folders; its path is short because sockets are inside."""
    folder = tmp_path_factory.mktemp("t")
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def left(folder: Path) -> set[str]:
    return {one.name for one in folder.iterdir()}


class Other:
    """Another process with a folder."""

    def __init__(self, kind: str) -> None:
        command = [sys.executable, "-c", HOLDS.format(kind)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self.process.stdout is not None
        self.folder = Path(self.process.stdout.readline().strip()).name

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def others() -> Iterator[list[Other]]:
    made: list[Other] = []
    yield made
    for one in made:
        one.kill()


def test_only_those_without_an_owner_are_removed(temporary_root: Path, others: list[Other]) -> None:
    others += [Other("nginx"), Other("")]
    killed, running = others
    foreign = temporary_root / "rwkv-bench"
    foreign.mkdir()
    mine = TemporaryFolder("library")
    assert left(temporary_root) == {killed.folder, running.folder, foreign.name, Path(mine.path).name}
    killed.kill()
    again = TemporaryFolder()
    kept = {running.folder, foreign.name, Path(mine.path).name}
    assert left(temporary_root) == {*kept, Path(again.path).name}
    for _ in range(2):
        again.remove()
        assert left(temporary_root) == kept
    mine.remove()


def test_folders_of_other_users_are_kept(temporary_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = temporary_root / "rwkv-a"
    folder.mkdir()
    (folder / "owner.lock").touch()
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    remove_stale()
    assert left(temporary_root) == {"rwkv-a"}
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary_root))
    remove_stale()
    assert left(temporary_root) == set()


def test_a_folder_removed_before_locking_is_recreated(temporary_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, times = fcntl.flock, [0]

    def late(descriptor: int, how: int) -> None:
        times[0] += 1
        if times[0] == 1:
            remove_stale()
        lock(descriptor, how)

    monkeypatch.setattr(private_files.fcntl, "flock", late)
    folder = TemporaryFolder()
    assert left(temporary_root) == {Path(folder.path).name} and (Path(folder.path) / "owner.lock").exists()
    folder.remove()


@pytest.mark.slow
def test_a_service_removes_folders_of_a_killed_one(temporary_root: Path, tmp_path: Path) -> None:
    flags = ("--http-workers", "1", "--files-dir", "none")
    killed = Service(tmp_path, *flags, program="test/fake_app.py", PYTHONPATH=".")
    try:
        wait_for(lambda: "serving" in killed.log.read_text(), 60, "it has an engine")
        before = left(temporary_root)
        killed.process.kill()
        killed.process.wait()
        assert before and left(temporary_root) == before
    finally:
        killed.close()
    service = Service(tmp_path, *flags, program="test/fake_app.py", PYTHONPATH=".")
    try:
        wait_for(lambda: "serving" in service.log.read_text(), 60, "it has an engine")
        assert not left(temporary_root) & before
        service.process.terminate()
        assert service.process.wait(60) == 0
    finally:
        service.close()
    assert left(temporary_root) == set()
