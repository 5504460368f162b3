"""The random numbers of every sampler: Philox4x32-10, uniform and Gumbel numbers.

Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011), and the known-answer
vectors of the Random123 library.

The random number of a token depends on (seed, step, token id) only:

    key     = (seed & 0xffffffff, seed >> 32)
    counter = (token_id // 4, step & 0xffffffff, step >> 32, domain)
    x       = word [token_id % 4] of Philox4x32-10(counter, key)
    u       = min((float32(x) + 0.5) * 2^-32, 1 - 2^-24)        in float32, strictly inside (0, 1)
    gumbel  = -log(-log(1 - u))                                 rounded to float32
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
WORD_MASK = 0xFFFFFFFF
U_MAX = 1 - 2**-24

DOMAIN_GUMBEL = 0
"""Fourth counter word for the Gumbel-max rule."""
DOMAIN_NOISE = 1
"""Fourth counter word for the uniform noise of `Method.NOISE`."""
DOMAIN_XTC = 2
"""Fourth counter word for the chance of XTC, at token 0."""

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Run ten rounds of Philox4x32. Tensors [...] int64 with values in 0 .. 2^32-1, of shapes that broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for round_number in range(ROUNDS):
        if round_number:
            k0, k1 = (k0 + WEYL[0]) & WORD_MASK, (k1 + WEYL[1]) & WORD_MASK
        # int64 products wrap, but their 64 bits are those of the unsigned product.
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        high0, high1 = (product0 >> 32) & WORD_MASK, (product1 >> 32) & WORD_MASK
        c0, c1 = high1 ^ c1 ^ k0, product1 & WORD_MASK
        c2, c3 = high0 ^ c3 ^ k1, product0 & WORD_MASK
    return c0, c1, c2, c3


def signed64(seed: int) -> int:
    """Return the int64 with the bits of an unsigned seed: torch has no unsigned arithmetic."""
    seed &= 0xFFFFFFFFFFFFFFFF
    return seed - 2**64 if seed >= 2**63 else seed


def words_at(seeds: Tensor, steps: Tensor, token_ids: Tensor, domain: int) -> Tensor:
    """Return the random word of each (row, token).

    seeds (bits of an unsigned number), steps: [R] int64; token_ids: [R, n] int64; result [R, n] int64.
    """
    c0, c1, c2, c3 = _blocks(seeds, steps, token_ids >> 2, domain)
    lane = token_ids & 3
    return torch.where(lane < 2, torch.where(lane == 0, c0, c1), torch.where(lane == 2, c2, c3))


def words_of_vocab(seeds: Tensor, steps: Tensor, vocab: int, domain: int) -> Tensor:
    """Return the random words of all tokens: [R, vocab] int64."""
    blocks = torch.arange((vocab + 3) // 4, device=seeds.device).unsqueeze(0)
    words = torch.stack(_blocks(seeds, steps, blocks, domain), dim=-1)
    return words.flatten(1)[:, :vocab]


def _blocks(seeds: Tensor, steps: Tensor, blocks: Tensor, domain: int) -> Words:
    """Return the four words of each row's Philox blocks. The blocks are [R, n] or [1, n]. Each word is [R, n]."""
    seeds, steps = seeds.unsqueeze(1), steps.unsqueeze(1)
    counter = (blocks, steps & WORD_MASK, (steps >> 32) & WORD_MASK, torch.full_like(steps, domain))
    return philox4x32(counter, (seeds & WORD_MASK, (seeds >> 32) & WORD_MASK))


def to_uniform(words: Tensor) -> Tensor:
    """Map words [...] int64 in 0 .. 2^32-1 to fp32 numbers [...] strictly between 0 and 1."""
    return words.float().add_(0.5).mul_(2.0**-32).clamp_(max=U_MAX)


def to_gumbel(words: Tensor) -> Tensor:
    """Map words [...] int64 to Gumbel numbers [...] fp32. The logarithms are in fp64."""
    return to_uniform(words).double().neg_().log1p_().neg_().log_().neg_().float()
