"""The reference that all else is held to: its written-out backward against autograd's."""

import pytest
import torch

from reference import delta_rule


def plainly(q, k, v, a, c, beta, s):
    outputs = []
    for t in range(q.shape[1]):
        s = s * a[:, t, :, None] * c[:, t, None]
        e = v[:, t] - (s * k[:, t, :, None]).sum(1)
        s = s + k[:, t, :, None] * (beta[:, t] * e)[:, None]
        outputs.append((s * q[:, t, :, None]).sum(1))
    return torch.stack(outputs, 1), s


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("cu", [None, [0, 3, 70]])
def test_backward_is_autograds(channels, cu):
    b, t, h, hv, k, v = (2 if cu is None else 1), 70, 1, 2, 3, 4
    n = b if cu is None else 2
    x = dict(q=torch.randn(b, t, h, k), k=torch.randn(b, t, h, k) / 2, v=torch.randn(b, t, hv, v), g=-torch.rand(b, t, hv),
             beta=torch.rand(b, t, hv, v) if channels else torch.rand(b, t, hv), initial_state=torch.randn(n, hv, k, v))
    if channels:
        x.update(gk=-torch.rand(b, t, hv, k), gv=-torch.rand(b, t, hv, v))
    x = {name: y.double().requires_grad_() for name, y in x.items()}
    results = []
    for options in ({}, {"recurrence": plainly}):
        o, ht = delta_rule(**x, cu_seqlens=cu, use_qk_l2norm_in_kernel=True, **options)
        results.append([o, ht, *torch.autograd.grad(o.square().sum() + ht.sin().sum(), list(x.values()))])
    for got, expected in zip(*results):
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)
