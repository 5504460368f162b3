"""CPU checks of the reference, and the error of its variants against exact products, with and without outliers."""

import int8
import torch

torch.manual_seed(0)
K, N, T = 4096, 512, 200


def two_scales(v: torch.Tensor) -> torch.Tensor:
    """Each segment with a scale of its own, any real number -> what is meant."""
    parts = (v[:, :128], v[:, 128:])
    return torch.cat([(p / (p.abs().amax(1, True) / 127)).round() * (p.abs().amax(1, True) / 127) for p in parts], 1)


for times in (1, 20, 100, 1000):
    x, w = torch.randn(T, K), torch.randn(N, K) / K**0.5
    outliers = torch.randperm(K)[:8]
    x[:, outliers] *= times
    y = x.double() @ w.double().T
    for alpha in (None, 0.5):
        s = torch.ones(K) if alpha is None else int8.smoothing_factors(x.abs().amax(0), w.abs().amax(0), alpha)
        positions = int8.permutation(x.abs().amax(0) / s)
        assert sorted(positions.tolist()) == list(range(K)) and (times == 1 or max(positions[outliers]) < 128)
        qw, qx = int8.quantise_weight(w, s, positions), int8.quantise_rows(x, 1 / s, positions)
        got = int8.product(qx, qw).double()
        px, pw = torch.empty_like(x), torch.empty_like(w)
        px[:, positions], pw[:, positions] = x / s, w * s
        free = two_scales(px).double() @ two_scales(pw).double().T
        one = lambda v: (v / (v.abs().amax(1, True) / 127)).round() * (v.abs().amax(1, True) / 127)
        whole = one(px).double() @ one(pw).double().T
        err = lambda a: ((a - y).norm() / y.norm()).item()
        print(
            f"outliers {times:4}x alpha {alpha}: one scale {err(whole):.5f}, two free scales {err(free):.5f}, ratios {err(got):.5f}; ratios x {qx.ratios.float().mean():.1f} w {qw.ratios.float().mean():.1f}"
        )
h = torch.randn(T, K).half()
q = int8.quantise_rows(h, None, None, True)
print("relu^2", q.codes.dtype, q.codes.max().item())
