"""Some wrong changes of the product, and that the tests see each; `python -m bench.mutants` tries all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.mutants.mutant import Mutant
from bench.mutants.runner import MUTANTS, ROOT, Limits, Trees, Unchanged, applied, try_mutant

CI = [mutant for mutant in MUTANTS if mutant.in_ci]


def test_every_mutant_applies() -> None:
    """Whoever changes a line that a mutant is about moves the mutant with it, or takes it off the list."""
    broken: list[str] = []
    for mutant in MUTANTS:
        try:
            changed = applied(mutant, (ROOT / mutant.file).read_text(encoding="utf-8"))
            if mutant.file.endswith(".py"):
                compile(changed, mutant.file, "exec")
        except (ValueError, SyntaxError) as error:
            broken.append(f"{mutant.name}: {error}")
    assert not broken, "\n".join(broken)
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 150
    assert all((ROOT / test).exists() for mutant in MUTANTS for test in mutant.tests)


@pytest.fixture(scope="module")
def trees() -> Iterator[Trees]:
    with Trees(1) as trees:
        yield trees


@pytest.mark.parametrize("mutant", CI, ids=lambda mutant: mutant.name)
def test_a_wrong_change_is_seen(trees: Trees, mutant: Mutant) -> None:
    limits = Limits(mutant_s=150.0)
    assert try_mutant(trees, mutant, Unchanged(limits), limits).verdict == "killed"
