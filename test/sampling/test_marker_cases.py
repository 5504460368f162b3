"""Texts with markers by a random model under masks: ten thousand in the long tests."""

from __future__ import annotations

import pytest

from test.conftest import IS_LONG
from test.sampling.test_required_text import check_random_texts

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", range(1, 9) if IS_LONG else (1,))
def test_a_random_model_gives_each_marker_once_and_tags_nest(seed: int) -> None:
    check_random_texts(seed, 1250 if IS_LONG else 600)
