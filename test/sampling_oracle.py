"""Sampling by its definition in numpy and fp64.

It uses full sorts and dicts of counts. The samplers are tested against it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sampling.params import Method, SamplingParams

Floats = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint32]


def philox(counter: npt.NDArray[np.uint64], key: tuple[int, int]) -> Words:
    """Philox4x32-10 of counters [n, 4] under one key: [n, 4]."""
    c = counter.astype(np.uint64)
    k = np.array(key, dtype=np.uint64)
    mask, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        p0, p1 = c[:, 0] * np.uint64(0xD2511F53), c[:, 2] * np.uint64(0xCD9E8D57)
        c = np.stack([p1 >> shift ^ c[:, 1] ^ k[0], p1 & mask, p0 >> shift ^ c[:, 3] ^ k[1], p0 & mask], axis=1)
        k = (k + np.array([0x9E3779B9, 0xBB67AE85], dtype=np.uint64)) & mask
    return c.astype(np.uint32)


def uniforms(seed: int, step: int, vocab: int, domain: int) -> Floats:
    """u of every token: [vocab], fp32 values."""
    blocks = (vocab + 3) // 4
    counter = np.zeros((blocks, 4), dtype=np.uint64)
    counter[:, 0], counter[:, 1:] = np.arange(blocks), (step & 0xFFFFFFFF, step >> 32, domain)
    words = philox(counter, (seed & 0xFFFFFFFF, seed >> 32)).reshape(-1)[:vocab]
    u = (words.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    below_one: Floats = np.minimum(u, np.float32(1 - 2.0**-24)).astype(np.float64)
    return below_one


@dataclass
class OracleSample:
    """What one row may sample at one step."""

    token: int
    kept: npt.NDArray[np.bool_]
    """[V]"""
    is_ambiguous: bool
    """Rounding may decide between two tokens, or whether a token is kept."""


@dataclass
class OracleRow:
    """A row's parameters and what it has generated."""

    params: SamplingParams
    penalty_exempt: frozenset[int] = frozenset()
    step: int = 0
    counts: dict[int, float] = field(default_factory=dict)

    def adjusted(self, logits: npt.NDArray[np.float32]) -> Floats:
        """Logits after bias, bans and penalties; no NaN."""
        changed = logits.astype(np.float64)
        for token, bias in self.params.logit_bias.items():
            changed[token] += bias
        if self.params.method is Method.STANDARD:
            for token, count in self.counts.items():
                changed[token] -= self.params.presence_penalty + count * self.params.frequency_penalty
        changed[np.isnan(changed)] = -np.inf
        return np.minimum(changed, 1e30)

    def sample(self, logits: npt.NDArray[np.float32]) -> OracleSample:
        """Return the token that the definition samples from logits [V]."""
        changed, p = self.adjusted(logits), self.params
        order = np.lexsort((np.arange(len(changed)), -changed))
        if changed[order[0]] == -np.inf:
            return OracleSample(0, np.arange(len(changed)) == 0, False)
        if p.temperature == 0 or p.is_greedy or (p.method is Method.NOISE and p.noise == 0):
            close = bool(np.partition(changed, -2)[-2] > changed[order[0]] - 1e-6)
            return OracleSample(int(order[0]), np.arange(len(changed)) == order[0], close and bool(self.counts))
        scaled = changed / p.temperature
        if p.method is Method.NOISE:
            kept, is_ambiguous = np.ones(len(changed), dtype=bool), False
            score = scaled + p.noise * uniforms(p.seed, self.step, len(changed), 1)
        else:
            kept, is_ambiguous = kept_tokens(scaled, order, p)
            score = scaled - np.log(-np.log1p(-uniforms(p.seed, self.step, len(changed), 0)))
        score[~kept] = -np.inf
        second, best = np.partition(score, -2)[-2:]
        return OracleSample(int(score.argmax()), kept, is_ambiguous or bool(best - second < 1e-5 * max(1.0, abs(best))))

    def count(self, token: int) -> None:
        """Count a sampled token."""
        self.step += 1
        for seen in self.counts:
            self.counts[seen] *= self.params.penalty_decay
        self.counts[token] = self.counts.get(token, 0.0) + (token not in self.penalty_exempt)


def kept_tokens(
    scaled: Floats, order: npt.NDArray[np.intp], params: SamplingParams
) -> tuple[npt.NDArray[np.bool_], bool]:
    """Mask [V] of the kept tokens, and whether rounding could move it."""
    mass = np.exp(scaled[order] - scaled[order[0]])
    before = np.cumsum(mass) - mass
    within_k = np.arange(len(order)) < (params.top_k if params.top_k > 0 else len(order))
    enough = params.top_p * mass.sum() if params.top_p < 1 else np.inf
    within_p = before < enough
    within_p[0] = True
    kept = np.zeros(len(order), dtype=bool)
    kept[order[within_k & within_p]] = True
    near = np.abs(before - enough) < 2e-6 * mass.sum()
    exact = np.all(scaled[np.isfinite(scaled)] == scaled[order[0]])
    return kept, bool(np.any(near[within_k][1:])) and not exact and params.top_p < 1
