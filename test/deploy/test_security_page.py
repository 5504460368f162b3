"""SECURITY.md: each row of the threat model names existing tests or is marked open."""

from __future__ import annotations

import re

from test.serving import ROOT

WHO = "stranger page holder neighbour giver local"


def test_every_threat_has_a_test_or_is_called_open() -> None:
    text = (ROOT / "SECURITY.md").read_text("utf-8").partition("## Threat model")[2]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    assert len(rows) > 20 and all(len(row) == 4 for row in rows)
    for who in WHO.split():
        assert any(who in row[0] for row in rows), who
    for _, threat, holds, tests in rows[2:]:
        named = re.findall(r"`(test/[^`]+)`", tests)
        assert named or "**open**" in holds, threat
        for path in named:
            assert (ROOT / path).exists(), f"SECURITY.md names {path}, which is gone"


def test_the_version_is_the_same_everywhere() -> None:
    version = re.search(r'^__version__ = "(.+)"$', (ROOT / "rwkv_batch/version.py").read_text("utf-8"), re.MULTILINE)
    assert version is not None
    assert f"\nversion: {version[1]}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"## [{version[1]}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")
