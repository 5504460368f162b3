"""Ten thousand texts with markers by a random model under masks."""

from __future__ import annotations

import pytest

from test.sampling.test_required_text import check_random_texts


@pytest.mark.parametrize("seed", range(1, 9))
def test_a_random_model_gives_each_marker_once_and_tags_nest(seed: int) -> None:
    check_random_texts(seed, 1250)
