"""Some wrong changes of the product, and that the tests see each; `python -m bench.mutants` tries all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.mutants import runner
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


def test_every_expected_test_exists() -> None:
    """pytest runs none of the tests it is given if it does not find one of them."""
    missing = [test for mutant in MUTANTS for test in mutant.tests if not _exists(test)]
    assert not missing, "\n".join(missing)


def _exists(test: str) -> bool:
    """Whether there is such a file, and in it a test of this name; of its parameters nothing is said."""
    file, _, name = test.partition("::")
    path = ROOT / file
    return path.is_file() and f"\ndef {name.partition('[')[0]}" in path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def trees() -> Iterator[Trees]:
    with Trees(1) as trees:
        yield trees


@pytest.mark.parametrize("mutant", CI, ids=lambda mutant: mutant.name)
def test_a_wrong_change_is_seen(trees: Trees, mutant: Mutant) -> None:
    limits = Limits(run_s=150.0)
    assert try_mutant(trees, mutant, Unchanged(limits), limits).verdict == "killed"


BROKEN = "import no_such_module\n"
WRONG = "def test_wrong():\n    assert False\n\ndef test_right():\n    pass\n"


@pytest.mark.parametrize(("source", "failing"), [(BROKEN, ""), (WRONG, "::test_wrong")], ids=["a file", "a test"])
def test_what_fails_without_any_change_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, failing: str
) -> None:
    """Also a file that cannot be imported: it is not asked for again and again."""
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_it.py").write_text(source)
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    unchanged = Unchanged(Limits())
    assert runner.confirmed_failure(runner.Tree(tmp_path), ["test/test_it.py"], unchanged, Limits()) == ""
    assert unchanged.failing == {f"test/test_it.py{failing}"}


def test_where_every_test_is_left_out_nothing_is_seen(tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_it.py").write_text(WRONG)
    left_out = ["test/test_it.py::test_wrong", "test/test_it.py::test_right"]
    assert runner.first_failure(runner.Tree(tmp_path), ["test/test_it.py"], Limits(), left_out) == ""


def test_a_test_that_is_not_there_has_seen_nothing(tmp_path: Path) -> None:
    """Such as a case that has another name by now."""
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_it.py").write_text(WRONG)
    with pytest.raises(ValueError, match=r"there is no test .*test_it\.py::test_gone"):
        runner.first_failure(runner.Tree(tmp_path), ["test/test_it.py::test_gone"], Limits())


def test_a_single_test_runs_before_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one of a file that comes later as a whole."""
    (tmp_path / "test").mkdir()
    (tmp_path / "it.py").write_text("works = True\n")
    source = "import it\n\ndef test_first():\n    assert it.works\n\ndef test_known():\n    assert it.works\n"
    (tmp_path / "test" / "test_it.py").write_text(source)
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    mutant = Mutant("it.py", "True", "False", "broken", ("test/test_it.py::test_known", "test/test_it.py"))
    with Trees(1) as trees:
        outcome = try_mutant(trees, mutant, Unchanged(Limits()), Limits())
    assert outcome.seen_by == "test/test_it.py::test_known"


def test_a_failure_counts_if_the_change_is_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, source in (("unchanged", WRONG.replace("False", "True")), ("changed", WRONG)):
        (tmp_path / name / "test").mkdir(parents=True)
        (tmp_path / name / "test" / "test_it.py").write_text(source)
    monkeypatch.setattr(runner, "ROOT", tmp_path / "unchanged")
    found = runner.confirmed_failure(
        runner.Tree(tmp_path / "changed"), ["test/test_it.py"], Unchanged(Limits()), Limits()
    )
    assert found == "test/test_it.py::test_wrong"
