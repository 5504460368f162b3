"""Runs the tutorial's curl examples from their script."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from test.serving import ROOT, Service


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_tutorials_examples(service: Service) -> None:
    ran = subprocess.run(
        ["bash", str(ROOT / "test/test_curl.sh"), service.url], capture_output=True, text=True, timeout=170, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
