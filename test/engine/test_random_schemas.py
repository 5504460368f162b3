"""Random schemas: every text that a grammar lets finish is valid."""

from __future__ import annotations

from itertools import islice

from test.engine.schema_answers import answer, numbered, walk


def test_texts_that_masks_allow_are_valid() -> None:
    counted, wrong = walk(numbered(60), walks=1)
    assert not wrong, "\n".join(wrong)
    assert counted["served"] >= 40 and counted["finished"] >= 35, counted
    assert any(name.startswith("refused") for name in counted), "some keywords cannot be held to"
    assert not counted["dead end"]


def test_schemas_with_dead_ends_are_refused_in_advance() -> None:
    """Schemas among the first thousand that once led to a dead end."""
    random_ones = dict(numbered(543))
    counted, _ = walk(((number, random_ones[number]) for number in (36, 345, 518, 542)), walks=2)
    assert list(counted.values()) == [4] and "no value can end" in next(iter(counted)), counted


def test_answers_of_a_random_model_are_valid() -> None:
    counted, wrong = answer(islice(numbered(200), 150, 174), rows=24)
    assert not wrong, "\n".join(wrong)
    assert counted["ended: stop"] >= 10, counted
