"""`bench.state_pool.store` in its shortest form."""

from __future__ import annotations

from pathlib import Path

from bench.state_pool.store import options, states_in, turns_of


def test_it_measures_turns_and_states_wherever_they_are_kept(tmp_path: Path) -> None:
    asked = options(["--seconds", "0.2", "--state-mb", "0.1", "--at-once", "4"])
    (tmp_path / "objects").mkdir()
    for store in ("", (tmp_path / "objects").as_uri()):
        (folder := tmp_path / f"database{len(store)}").mkdir()
        figures = states_in(folder, "", store, asked)
        assert min(float(figures[name]) for name in ("put_ms", "get_ms")) > 0
        assert figures["place"] == (store or "sqlite")
    assert turns_of(1, str(tmp_path), "", asked)["engines"] == 1
