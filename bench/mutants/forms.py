"""Mutants of the forms that states are stored in."""

from __future__ import annotations

from bench.mutants.mutant import Mutant, of

MUTANTS: list[Mutant] = [
    *of(
        "rwkv_batch/model/state_form.py",
        ("test/model/test_state_form.py",),
        [
            (
                "codes = (steps.add_(chance) >> FRACTION_BITS)",
                "codes = (steps.add_(1 << (FRACTION_BITS - 1)) >> FRACTION_BITS)",
                "states of int8 forget nothing that decays slowly",
                "test/model/test_state_form.py::test_slow_decays_are_kept_in_the_mean",
            ),
            (
                "(largest >= KEEP * old)",
                "(largest > TOP * old)",
                "states of int8 that nothing changes are rounded anew",
                "test/model/test_state_form.py::test_what_does_not_change_stays_bit_for_bit",
            ),
            (
                "pack_int8(states, before)",
                "pack_int8(states.roll(1, 0), before)",
                "a row gets another row's state",
                "test/model/test_state_form.py::test_rows_are_kept_apart",
            ),
        ],
    ),
    *of(
        "rwkv_batch/runner/state_copy.py",
        ("test/engine/test_state_forms.py",),
        [
            (
                "piece = form.pack(wkv[first : first + part.shape[1]])",
                "piece = form.pack(wkv[: part.shape[1]])",
                "later stages begin from the first stage's tuned state",
                "test/engine/test_state_forms.py::test_a_tuned_state_is_packed_into_its_slot",
            ),
        ],
    ),
]
