"""Mutants of the samplers."""

from __future__ import annotations

from bench.mutants.mutant import Mutant, of

SAMPLING = ("test/sampling/test_sampling.py", "test/sampling/test_sampling_parts.py")

MUTANTS: list[Mutant] = [
    *of(
        "sampling/naive.py",
        SAMPLING,
        [
            (
                "    mass = ((values * scale) - largest.unsqueeze(1) * scale).exp_().double()\n",
                "    mass = ((values * scale) - largest.unsqueeze(1) * scale).exp_()\n",
                "masses are summed in fp32",
                "test/sampling/test_sampling_parts.py::test_masses_are_summed_in_fp64",
            ),
            (
                "    before = mass.cumsum(dim=1).sub_(mass)\n",
                "    before = mass.cumsum(dim=1)\n",
                "the token that crosses top_p is left out",
                "test/sampling/test_sampling.py::test_kept_tokens_are_all_drawn_and_no_others[naive]",
            ),
            ("    kept[:, 0] = True\n", "", "a tiny top_p leaves no token"),
            (
                'return tokens.masked_fill_(largest == -float("inf"), 0)',
                "return tokens",
                "a row of NaN draws no token id",
                "test/sampling/test_sampling.py::test_nan_and_infinite_logits_harm_no_other_row",
            ),
            (
                "ids.masked_fill(score != best, torch.iinfo(torch.int64).max).amin(dim=1)",
                "ids.masked_fill(score != best, -1).amax(dim=1)",
                "of equal tokens the higher id is drawn",
                "test/sampling/test_sampling.py::test_of_equal_scores_the_lower_id_is_drawn[naive]",
            ),
            (
                '    undecided = ((last <= values[:, -1:]) & (last > -float("inf"))).flatten()\n',
                "    undecided = torch.zeros(len(values), dtype=torch.bool)\n",
                "flat distributions are cut short",
            ),
            (
                "        self.table.advance(plan.seats)\n",
                "",
                "every token is drawn with the same random number",
                "test/sampling/test_sampling.py::test_steps_and_seeds_decide",
            ),
            (
                "nan=-infinity, posinf=MAX_LOGIT",
                "nan=MAX_LOGIT, posinf=MAX_LOGIT",
                "a NaN wins",
                "test/sampling/test_sampling.py::test_nan_and_infinite_logits_harm_no_other_row",
            ),
            (
                "            self._plan, self._plan_for = make_plan(self.table, seats), asked\n",
                "            self._plan, self._plan_for = self._plan or make_plan(self.table, seats), asked\n",
                "new rows draw with the parameters of those before",
            ),
        ],
        ci=(1,),
    ),
    *of(
        "sampling/seats.py",
        SAMPLING,
        [
            (
                "        self.steps[seat] = 0\n",
                "",
                "a seed draws differently in a seat used before",
                "test/sampling/test_sampling.py::test_a_row_that_moves_in_forgets_the_last_one",
            ),
            (
                "        self.num_seen[seat] = 0\n",
                "",
                "a new row is punished for another's tokens",
                "test/sampling/test_sampling.py::test_a_row_that_moves_in_forgets_the_last_one",
            ),
            (
                "        counts = self.seen_counts[seats, :width] * alphas[:, 2:3]\n",
                "        counts = self.seen_counts[seats, :width].clone()\n",
                "penalty_decay does nothing",
                "test/sampling/test_sampling.py::test_penalties_step_by_step",
            ),
            (
                "(here & ~self.penalty_exempt[tokens].unsqueeze(1))",
                "here",
                "digits and spaces are punished",
                "test/sampling/test_sampling.py::test_penalties_step_by_step",
            ),
            (
                "        counts = counts.masked_fill_(fresh, 0.0)",
                "        counts = counts",
                "what the last row in a seat drew counts for the next",
                "test/sampling/test_sampling.py::test_a_new_rows_counts_begin_at_zero[naive]",
            ),
            (
                "penalty = self.seen_counts[seats, :width] * alphas[:, 1:2] + alphas[:, 0:1]",
                "penalty = self.seen_counts[seats, :width] * (alphas[:, 1:2] + alphas[:, 0:1])",
                "the presence penalty grows with the count",
                "test/sampling/test_sampling.py::test_penalties_step_by_step",
            ),
            ("        self.version += 1\n", "", "plans outlive the rows they were made for"),
        ],
    ),
    *of(
        "sampling/cpu.py",
        SAMPLING,
        [
            (
                "top_k=params.top_k if 0 < params.top_k < vocab else vocab",
                "top_k=params.top_k",
                "top_k 0 keeps nothing",
            ),
            (
                "    if params.method is Method.NOISE:\n        return NOISE\n",
                "",
                "/v2 draws as /v1",
                "test/sampling/test_sampling.py::test_noise",
            ),
            (
                "    if is_greedy(params):\n        return GREEDY\n",
                "",
                "temperature 0 is not greedy",
                "test/sampling/test_sampling.py::test_greedy_rows_take_the_lowest_of_equal_tokens",
            ),
            (
                "seed=params.seed & 0xFFFFFFFFFFFFFFFF",
                "seed=params.seed & 0xFFFFFFFF",
                "seeds above 32 bits draw alike",
            ),
            (
                "        before = raw_logprobs(logits, asked)\n        tokens = torch.empty(rows, dtype=torch.int64)\n",
                "        tokens = torch.empty(rows, dtype=torch.int64)\n        before = raw_logprobs(logits[:, :1].expand_as(logits), asked)\n",
                "log-probabilities are of other tokens",
                "test/sampling/test_sampling.py::test_logprobs_are_of_the_raw_distribution[cpu]",
            ),
        ],
        ci=(4,),
    ),
    *of(
        "sampling/csrc/sampler.cpp",
        SAMPLING,
        [
            (
                "if (p.top_p < 1) limits.enough = p.top_p * total_mass(row);",
                "if (p.top_p < 1) limits.enough = static_cast<float>(p.top_p * total_mass(row)) * 0.999f;",
                "masses are compared in fp32",
                "test/sampling/test_sampling.py::test_a_token_just_below_top_p_is_kept[cpu]",
            ),
            (
                "    seat.counts[i] *= seat.parameters.decay;\n",
                "",
                "penalty_decay does nothing on a CPU",
                "test/sampling/test_sampling.py::test_penalties_step_by_step",
            ),
            (
                "  if (!penalty_exempt[token]) seat.counts[at] += 1.0f;",
                "  seat.counts[at] += 1.0f;",
                "digits and spaces are punished on a CPU",
                "test/sampling/test_sampling.py::test_penalties_step_by_step",
            ),
            (
                "  taken.seen.clear();\n  taken.counts.clear();\n",
                "",
                "a new row is punished for another's tokens on a CPU",
                "test/sampling/test_sampling.py::test_a_row_that_moves_in_forgets_the_last_one",
            ),
        ],
    ),
]
