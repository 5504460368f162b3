"""Some wrong changes of the product, and that the tests see each; `python -m bench.mutants` tries all."""

from __future__ import annotations

import json
import select
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.mutants.__main__ import seen_before, write
from bench.mutants.mutant import Mutant
from bench.mutants.runner import (
    MUTANTS,
    ROOT,
    Change,
    Limits,
    Tree,
    Trees,
    Unchanged,
    applied,
    confirmed_failure,
    first_failure,
    try_mutant,
)
from test.serving import wait_for

CI = [mutant for mutant in MUTANTS if mutant.in_ci]
LIMITS = Limits(run_s=500.0, test_s=300.0)


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
def tree() -> Iterator[Tree]:
    with Trees(1) as trees, trees.taken() as tree:
        yield tree


def test_without_a_change_they_pass(tree: Tree) -> None:
    assert first_failure(tree, sorted({mutant.tests[0] for mutant in CI}), LIMITS) == ""


@pytest.mark.parametrize("mutant", CI, ids=lambda mutant: mutant.name)
def test_a_wrong_change_is_seen(tree: Tree, mutant: Mutant) -> None:
    """By the test that is known to see it, or by one of a few worlds: that takes a second."""
    assert Change(tree, mutant).first_failure([mutant.tests[0]], LIMITS).startswith(mutant.tests[0])


BROKEN = "import no_such_module\n"
WRONG = "import it\n\ndef test_wrong():\n    assert it.works\n\ndef test_right():\n    pass\n"


def changed(tree: Tree, folder: Path, source: str, tests: str) -> Change:
    """In a tree of a module and tests of it, the module wrong."""
    (folder / "test").mkdir()
    (folder / "it.py").write_text(source)
    (folder / "test" / "test_it.py").write_text(tests)
    return Change(Tree(folder, tree.python), Mutant("it.py", "True", "False", "broken", ("test/test_it.py",)))


@pytest.mark.parametrize(("tests", "failing"), [(BROKEN, ""), (WRONG, "::test_wrong")], ids=["a file", "a test"])
def test_what_fails_without_any_change_is_left_out(tree: Tree, tmp_path: Path, tests: str, failing: str) -> None:
    """Also a file that cannot be imported: it is not asked for again and again."""
    unchanged, change = Unchanged(LIMITS), changed(tree, tmp_path, "works = not True\n", tests)
    change = replace(change, mutant=replace(change.mutant, replacement="1"))
    assert confirmed_failure(change, ["test/test_it.py"], unchanged, LIMITS) == ""
    assert unchanged.failing == {f"test/test_it.py{failing}"}


def test_where_every_test_is_left_out_nothing_is_seen(tree: Tree, tmp_path: Path) -> None:
    change = changed(tree, tmp_path, "works = True\n", WRONG)
    left_out = ["test/test_it.py::test_wrong", "test/test_it.py::test_right"]
    assert change.first_failure(["test/test_it.py"], LIMITS, left_out) == ""


def test_a_test_that_is_not_there_has_seen_nothing(tree: Tree, tmp_path: Path) -> None:
    """Such as a case that has another name by now."""
    change = changed(tree, tmp_path, "works = True\n", WRONG)
    with pytest.raises(ValueError, match=r"there is no test .*test_it\.py::test_gone"):
        change.first_failure(["test/test_it.py::test_gone"], LIMITS)


def test_a_single_test_runs_before_the_files(tree: Tree, tmp_path: Path) -> None:
    """Also one of a file that comes later as a whole."""
    change = changed(tree, tmp_path, "works = True\n", WRONG + "\ndef test_known():\n    assert it.works\n")
    mutant = replace(change.mutant, tests=("test/test_it.py::test_known", "test/test_it.py"))
    outcome = try_mutant(change.tree, mutant, Unchanged(LIMITS), LIMITS)
    assert outcome.seen_by == "test/test_it.py::test_known"


def test_a_failure_counts_if_the_change_is_its_cause(tree: Tree, tmp_path: Path) -> None:
    change = changed(tree, tmp_path, "works = True\n", WRONG)
    assert confirmed_failure(change, ["test/test_it.py"], Unchanged(LIMITS), LIMITS) == "test/test_it.py::test_wrong"
    assert (tmp_path / "it.py").read_text() == "works = True\n"


def test_a_test_that_hangs_counts_at_once(tree: Tree, tmp_path: Path) -> None:
    """Whatever stands behind it: what it has opened may not close either."""
    hanging = (
        "import it, threading, pytest\n\n@pytest.fixture\ndef it_ends():\n    yield\n    threading.Event().wait()\n\n"
    )
    hanging += "def test_it(it_ends):\n    it.works or threading.Event().wait()\n"
    change = changed(tree, tmp_path, "works = True\n", hanging)
    assert change.first_failure(["test/test_it.py"], Limits(100.0, 0.5)) == "test/test_it.py::test_it"


def test_a_run_that_ends_before_anybody_looks_is_not_late(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a busy machine: its number and its exit status stand in the pipe together."""
    process = tree.python._process
    look = process.stdout.readline

    def look_late() -> bytes:
        wait_for(lambda: _stands_by(process.pid) and select.select([process.stdout], [], [], 0)[0], 60, "it has ended")
        monkeypatch.setattr(process, "stdout", process.stdout.real)
        return look()

    monkeypatch.setattr(
        process, "stdout", SimpleNamespace(readline=look_late, real=process.stdout, fileno=process.stdout.fileno)
    )
    assert first_failure(tree, ["test/test_documents.py::test_the_architecture_names_every_folder"], Limits(10.0)) == ""


def _stands_by(pid: int) -> bool:
    """Whether that process waits and has no child."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return not children and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def test_results_of_earlier_runs_are_merged(tmp_path: Path) -> None:
    """The last of them counts; what survived is tried again, and so is what somebody has written there by hand."""
    runs = [
        [("a", "killed", 3.0), ("b", "killed", 1.0), ("c", "killed", 0)],
        [("a", "killed", 5.0), ("d", "survived", 2.0)],
    ]
    files = [tmp_path / f"{number}.json" for number in range(len(runs))]
    for file, run in zip(files, runs, strict=True):
        results = [{"name": name, "verdict": verdict, "seconds": seconds} for name, verdict, seconds in run]
        file.write_text(json.dumps({"results": results}))
    assert {name: one["seconds"] for name, one in seen_before(files).items()} == {"a": 5.0, "b": 1.0}


def test_results_of_mutants_that_are_gone_are_left_out(tmp_path: Path) -> None:
    out, names = tmp_path / "out.json", (MUTANTS[0].name, "one that there is none of")
    write(out, {}, {name: {"name": name} for name in names})
    assert json.loads(out.read_text())["results"] == [{"name": MUTANTS[0].name}]
