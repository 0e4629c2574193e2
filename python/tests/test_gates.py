"""Gates, cumulative sums and norms standing alone, against the same in PyTorch's float64."""

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

from gdn import gates, library, norms, utils
from gdn._lib import OPS

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# What rounding to the dtype costs, and below it float32's arithmetic.
ERROR = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float64: 1e-13}


def close(got, want, dtype, most=1):
    """By the largest of what is expected."""
    assert torch.isfinite(got).all()
    error = (got.double() - want).abs().max() if want.numel() else 0
    assert error <= most * ERROR[dtype] * max(want.abs().max().item() if want.numel() else 0, 1e-6), error


def check(function, reference, inputs, most=1):
    """Results and gradients of function(**inputs), against reference(**inputs) in float64 of the same, rounded, numbers."""
    inputs = {n: t.requires_grad_() for n, t in inputs.items()}
    wide = {n: t.detach().double().requires_grad_() for n, t in inputs.items()}
    y, want = function(**inputs), reference(**wide)
    close(y, want, y.dtype, most)
    dy = torch.randn_like(want)
    got = torch.autograd.grad(y, list(inputs.values()), dy.to(y.dtype))
    for name, a, b in zip(inputs, got, torch.autograd.grad(want, list(wide.values()), dy.to(y.dtype).double())):
        assert a.dtype == inputs[name].dtype and a.shape == inputs[name].shape
        close(a, b, a.dtype, 8 * most)


def softplus_gate(g, A_log=None, dt_bias=None):
    x = g if dt_bias is None else g + dt_bias.reshape(g.shape[-2:])
    return -(1 if A_log is None else A_log.reshape(-1, 1).exp()) * F.softplus(x, threshold=100)


def bounded_gate(g, A_log=None, dt_bias=None, bound=-5.0):
    x = g if dt_bias is None else g + dt_bias.reshape(g.shape[-2:])
    return bound * torch.sigmoid(x if A_log is None else A_log.reshape(-1, 1).exp() * x)


@pytest.mark.parametrize("shape", [(1, 32, 2), (2, 64, 4), (4, 128, 8), (4, 128, 16), (7, 3), (5,), (2, 3, 4, 5)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", FLOATS)
def test_gdn_gate(shape, bias, dtype):
    inputs = dict(g=torch.randn(shape).to(dtype), A_log=torch.randn(shape[-1], 1))
    if bias:
        inputs.update(dt_bias=torch.randn(shape[-1]))
    wide = {torch.float64: torch.float64}.get(dtype, torch.float32)
    check(lambda **x: gates.fused_gdn_gate(**x, output_dtype=wide), lambda g, A_log, dt_bias=None: softplus_gate(
        g.unsqueeze(-1), A_log, dt_bias).squeeze(-1), inputs, most=1 if dtype != torch.float64 else 1)
    with torch.no_grad():
        assert torch.equal(gates.gdn_gate_fwd(**inputs), gates.fused_gdn_gate(**inputs))
        close(gates.naive_gdn_gate(**inputs), gates.fused_gdn_gate(**inputs).double(), torch.float32)


@pytest.mark.parametrize("shape", [(1, 2, 2, 12), (1, 32, 2, 16), (2, 64, 4, 32), (2, 40, 8, 64), (6, 3, 5), (3, 7)])
@pytest.mark.parametrize("A_log", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("bound", [None, -5.0])
def test_kda_gate(shape, A_log, bias, bound):
    dtype = FLOATS[(A_log + 2 * bias) % 3]
    inputs = dict(g=torch.randn(shape).to(dtype))
    if A_log:
        inputs.update(A_log=torch.randn(1, 1, shape[-2]))
    if bias:
        inputs.update(dt_bias=torch.randn(shape[-2] * shape[-1]))
    check(lambda **x: gates.fused_kda_gate(**x, lower_bound=bound), softplus_gate if bound is None else bounded_gate, inputs)
    y = gates.fused_kda_gate(**inputs, lower_bound=bound)
    naive = gates.naive_kda_gate if bound is None else lambda **x: gates.naive_kda_lowerbound_gate(**x, lower_bound=bound)
    close(naive(**inputs), y.detach().double(), torch.float32)
    dy = torch.randn_like(y)
    wanted = dict(zip(inputs, torch.autograd.grad(y, list(inputs.values()), dy)))
    got = gates.kda_gate_bwd(inputs["g"], inputs.get("A_log"), inputs.get("dt_bias"), dy, bound)
    for name, gradient in zip(("g", "A_log", "dt_bias"), got):
        assert (gradient is None) == (name not in inputs) and (gradient is None or torch.equal(gradient, wanted[name]))


def test_gdn_gate_bwd():
    g, A_log, bias, dy = torch.randn(2, 9, 3), torch.randn(3), torch.randn(3), torch.randn(2, 9, 3)
    x = [t.clone().requires_grad_() for t in (g, A_log, bias)]
    for got, want in zip(gates.gdn_gate_bwd(g, A_log, bias, dy), torch.autograd.grad(gates.fused_gdn_gate(*x), x, dy)):
        assert torch.equal(got, want)
    assert gates.gdn_gate_bwd(g, A_log, None, dy)[2] is None


def test_gate_at_the_extremes():
    g = torch.tensor([-float("inf"), -200.0, -50.0, -20.0, 0.0, 20.0, 200.0, 1e30]).view(1, 8, 1).requires_grad_()
    for A_log in (-float("inf"), -5.0, 0.0, 90.0):
        a = torch.tensor([A_log]).requires_grad_()
        y = gates.fused_gdn_gate(g, a)
        grads = torch.autograd.grad(y.clamp_min(-1e30).sum(), (g, a))
        assert not any(t.isnan().any() for t in (y, *grads))
        assert y[0, 0, 0] == 0 and grads[0][0, 0, 0] == 0
    # Below -17 log(1 + exp(x)) is nothing but exp(x), which float32's 1 + exp(x) loses.
    y = gates.fused_gdn_gate(torch.full((1, 1, 1), -30.0), torch.zeros(1))
    assert abs(y.item() / -torch.tensor(-30.0).double().exp().item() - 1) < 1e-6
    raw = torch.tensor([-3.0, 3.0]).view(1, 2, 1, 1).requires_grad_()
    a, bias = torch.tensor([100.0]).requires_grad_(), torch.zeros(1, 1).requires_grad_()
    y = gates.fused_kda_gate(raw, a, bias, lower_bound=-5.0)
    assert y.flatten().tolist() == [0, -5]
    assert all((t == 0).all() for t in torch.autograd.grad(y.sum(), (raw, a, bias)))
    no_amplitude = gates.fused_kda_gate(raw, None, None, lower_bound=-5.0)
    assert torch.equal(no_amplitude, gates.fused_kda_gate(raw, torch.zeros(1), None, lower_bound=-5.0))


def test_sums_of_the_gradient_are_not_rounded_with_it():
    g, bias = torch.zeros(1, 4096, 1, 1, dtype=torch.bfloat16), torch.zeros(1, 1).requires_grad_()
    dy = torch.full((1, 4096, 1, 1), 1 + 2 ** -7 + 2 ** -10)  # rounded to bfloat16, each would lose its last bit
    gates.fused_kda_gate(g, None, bias).backward(dy)
    assert abs(bias.grad.item() / (-0.5 * dy.double().sum().item()) - 1) < 1e-6


@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("head_first", [False, True])
@pytest.mark.parametrize("cu", [None, [0, 15, 15, 100, 145]])
def test_chunk_cumsum(rank, reverse, head_first, cu):
    B, T = (2, 150) if cu is None else (1, 150)
    g = torch.randn(B, T, 3, 5)[..., 0] if rank == 3 else torch.randn(B, T, 3, 5)
    offsets = [0, T] if cu is None else cu
    seqlens = None if cu is None else torch.tensor(cu)

    def reference(g, chunk, scale=1.0):
        pieces = []
        for begin, end in zip(offsets, offsets[1:]):
            for c in range(begin, end, chunk):
                x = g[:, c:min(c + chunk, end)]
                pieces.append(x.flip(1).cumsum(1).flip(1) if reverse else x.cumsum(1))
        return torch.cat([*pieces, torch.zeros_like(g[:, offsets[-1]:])], 1) * scale

    def laid(x):
        return x.transpose(1, 2) if head_first else x

    check(lambda g: laid(gates.chunk_local_cumsum(laid(g), 64, reverse, 0.7, seqlens, head_first)), lambda g: reference(g, 64, 0.7), dict(g=g))
    check(lambda g: laid(gates.chunk_global_cumsum(laid(g), reverse, seqlens, head_first=head_first)), lambda g: reference(g, T), dict(g=g.detach()))
    assert gates.chunk_local_cumsum(g.detach().bfloat16(), 16, output_dtype=None).dtype == torch.bfloat16


@pytest.mark.parametrize("cu", [None, [0, 7, 7, 90]])
def test_gate_chunk_cumsum_is_gate_then_cumsum(cu):
    seqlens = None if cu is None else torch.tensor(cu, dtype=torch.int32)
    A_log, bias = torch.randn(3), torch.randn(3, 4)
    g = torch.randn(1, 90, 3, 4)
    for bound in (None, -5.0):
        both = gates.kda_gate_chunk_cumsum(g, A_log, 32, 1.4426950216, bias, seqlens, lower_bound=bound)
        apart = gates.chunk_local_cumsum(gates.fused_kda_gate(g, A_log, bias, bound), 32, scale=1.4426950216, cu_seqlens=seqlens)
        close(both, apart.double(), torch.float32)
    both = gates.gdn_gate_chunk_cumsum(g[..., 0], A_log, 32, None, bias[:, 0], seqlens)
    apart = gates.chunk_local_cumsum(gates.fused_gdn_gate(g[..., 0], A_log, bias[:, 0]), 32, cu_seqlens=seqlens)
    close(both, apart.double(), torch.float32)


def test_cumsum_lets_resets_pass():
    g = torch.tensor([-1.0, -float("inf"), -2.0, -1.0]).view(1, 4, 1)
    assert gates.chunk_local_cumsum(g, 2).flatten().tolist() == [-1, -float("inf"), -2, -3]


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 9, 3), (2, 3, 4, 5), (0, 3)])
def test_beta_sigmoid(shape):
    for dtype in FLOATS:
        x = torch.randn(shape).to(dtype)
        check(lambda x: gates.fused_beta_sigmoid(x, 2.0), lambda x: 2 * x.sigmoid(), dict(x=x))
        y = gates.fused_beta_sigmoid_fwd(x)
        assert y.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        dy = torch.randn_like(y)
        close(gates.fused_beta_sigmoid_bwd(x, dy), dy.double() * x.double().sigmoid() * (1 - x.double().sigmoid()), dtype, 8)


@pytest.mark.parametrize("D", [60, 64, 100, 128, 1024, 2048])
def test_l2norm(D):
    for dtype in FLOATS:
        x = torch.randn(2, 5, 3, D).to(dtype)
        check(norms.l2norm, lambda x: x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt(), dict(x=x))
        y, rstd = norms.l2norm_fwd(x)
        dy = torch.randn_like(y)
        x.requires_grad_()
        want = torch.autograd.grad(norms.l2norm(x), x, dy)[0].detach().double()
        x.requires_grad_(False)
        close(norms.l2norm_bwd(y, rstd, dy), want, dtype, 8)
    assert norms.l2norm(torch.randn(4, D).bfloat16(), output_dtype=torch.float32).dtype == torch.float32
    assert norms.l2norm(torch.randn(D), output_dtype=torch.bfloat16).dtype == torch.bfloat16


def test_l2norm_of_nothing_and_of_zeros():
    assert norms.l2norm(torch.randn(2, 0, 3, 8)).shape == (2, 0, 3, 8)
    x = torch.zeros(1, 1, 1, 8).requires_grad_()
    dy = torch.randn(1, 1, 1, 8)
    norms.l2norm(x).backward(dy)
    assert torch.allclose(x.grad, 1000 * dy)  # exact at 0: the factor is eps ** -0.5


@pytest.mark.parametrize("activation", ["swish", "sigmoid"])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("gated", [True, False])
def test_gated_rms_norm(activation, affine, gated):
    act = F.silu if activation == "swish" else torch.sigmoid

    def reference(x, g=None, weight=None):
        y = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        y = y if weight is None else y * weight
        return y if g is None else y * act(g)

    for i, dtype in enumerate(FLOATS):
        inputs = dict(x=torch.randn(2, 7, 3, 40).to(dtype))
        if gated:
            inputs.update(g=torch.randn(2, 7, 3, 40).to(FLOATS[i and i - 1]))
        if affine:
            inputs.update(weight=torch.randn(40))
        check(lambda **x: norms.rms_norm_gated(**x, eps=1e-5, activation=activation), reference, inputs)
    module = norms.FusedRMSNormGated(40, affine, activation=activation)
    x, g, residual = torch.randn(3, 5, 40), torch.randn(3, 5, 40) if gated else None, torch.randn(3, 5, 40)
    y, total = module(x, g, residual=residual, prenorm=True)
    assert torch.equal(total, x + residual) and torch.equal(y, module(total, g)) and (module.weight is not None) == affine


def test_gradcheck():
    g, A_log, bias = torch.randn(1, 7, 2, 3).double(), torch.randn(2).double(), torch.randn(2, 3).double()
    cu = torch.tensor([0, 3, 3, 6])
    for bound in (None, -5.0):
        f = lambda *x: gates.kda_gate_chunk_cumsum(x[0], x[1], 2, 0.5, x[2], cu, output_dtype=torch.float64, lower_bound=bound)  # noqa: E731
        assert torch.autograd.gradcheck(f, [t.requires_grad_() for t in (g, A_log, bias)])
    x, z, w = (torch.randn(2, 3, 4).double().requires_grad_() for _ in range(2)), None, torch.randn(4).double().requires_grad_()
    x, z = x
    for activation in ("swish", "sigmoid"):
        assert torch.autograd.gradcheck(lambda *t: norms.rms_norm_gated(*t, activation=activation), [x, z, w])
    assert torch.autograd.gradcheck(norms.l2norm, [x])


def operands(name):
    x, cu = torch.randn(1, 9, 2, 4), torch.tensor([0, 4, 8])
    given = dict(g=x, x=x, z=torch.randn_like(x), weight=torch.randn(4), A_log=torch.randn(2), dt_bias=torch.randn(2, 4), cu_seqlens=cu,
                 dout=torch.randn_like(x))
    numbers = dict(gate=1, bound=0.0, chunk=4, reverse=True, scale=0.5, eps=1e-6, mean=True, activation=1)
    row = OPS[name].row
    return [given[t["name"]].requires_grad_(name.endswith("fwd") and t["rule"] != "integer") for t in library.inputs(row)] + [
        numbers[n["name"]] for n in row["numbers"]]


@pytest.mark.parametrize("name", ["gate_fwd", "gate_bwd", "norm_fwd", "norm_bwd"])
def test_opcheck(name):
    opcheck(library.operator(name), tuple(operands(name)))


@pytest.mark.slow
def test_compile():
    def f(g, A_log, x, z, w):
        return gates.fused_kda_gate(g, A_log, None, -5.0).sum() + norms.rms_norm_gated(norms.l2norm(x), z, w).square().sum()

    x = [torch.randn(s).requires_grad_() for s in ((1, 5, 2, 8), (2,), (1, 5, 2, 8), (1, 5, 2, 8), (8,))]
    compiled = torch.compile(f, fullgraph=True)
    for got, want in zip(torch.autograd.grad(compiled(*x), x), torch.autograd.grad(f(*x), x)):
        assert torch.allclose(got, want)


@pytest.mark.parametrize("call, words", [
    (lambda: gates.fused_gdn_gate(torch.ones(1, 2, 3), None), "A_log"),
    (lambda: gates.fused_gdn_gate(torch.ones(1, 2, 3), torch.ones(4)), "A_log has shape"),
    (lambda: gates.fused_gdn_gate(torch.ones(1, 2, 3, dtype=torch.int32), torch.ones(3)), "g has dtype int32"),
    (lambda: gates.fused_kda_gate(torch.ones(1, 2, 3, 4), torch.ones(3), torch.ones(3)), "dt_bias has shape"),
    (lambda: gates.fused_kda_gate(torch.ones(1, 2, 3, 4), torch.ones(3), lower_bound=0.0), "lower_bound is 0"),
    (lambda: gates.fused_kda_gate(torch.ones(4)), "g has shape"),
    (lambda: gates.chunk_local_cumsum(torch.ones(1, 2, 3), 0), "chunk_size is 0"),
    (lambda: gates.chunk_local_cumsum(torch.ones(1, 2), 2), "g has shape"),
    (lambda: gates.chunk_local_cumsum(torch.ones(1, 2, 3), 2, scale=0.0), "scale is 0"),
    (lambda: gates.chunk_local_cumsum(torch.ones(2, 2, 3), 2, cu_seqlens=torch.tensor([0, 2])), "B=2"),
    (lambda: gates.chunk_local_cumsum(torch.ones(1, 2, 3), 2, cu_seqlens=torch.tensor([0, 3])), "at most T=2"),
    (lambda: gates.fused_beta_sigmoid(torch.ones(3), 0.0), "bound is 0"),
    (lambda: norms.l2norm(torch.ones(3), -1.0), "eps is -1"),
    (lambda: norms.rms_norm_gated(torch.ones(2, 3), torch.ones(2, 4)), "g has shape"),
    (lambda: norms.rms_norm_gated(torch.ones(2, 3), weight=torch.ones(2)), "weight has shape"),
    (lambda: norms.rms_norm_gated(torch.ones(2, 3), torch.ones(2, 3), activation="relu"), "activation is 'relu'"),
    (lambda: norms.FusedRMSNormGated(3, activation="gelu"), "activation is 'gelu'"),
])
def test_what_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_indices_of_packed_sequences():
    cu = torch.tensor([0, 2, 2, 7], dtype=torch.int32)
    assert utils.prepare_lens(cu).tolist() == [2, 0, 5]
    assert utils.prepare_cu_seqlens_from_lens(torch.tensor([2, 0, 5])).tolist() == cu.tolist()
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 1]]).bool()
    assert utils.prepare_lens_from_mask(mask).tolist() == [2, 0, 3]
    assert utils.prepare_cu_seqlens_from_mask(mask).tolist() == [0, 2, 2, 5]
    assert utils.prepare_position_ids(cu).tolist() == [0, 1, 0, 1, 2, 3, 4]
    assert utils.prepare_sequence_ids(cu).tolist() == [0, 0, 2, 2, 2, 2, 2]
    assert utils.prepare_token_indices(cu, cu).tolist() == [[0, 0], [0, 1], [2, 0], [2, 1], [2, 2], [2, 3], [2, 4]]
    assert utils.prepare_chunk_indices(cu, 2).tolist() == [[0, 0], [2, 0], [2, 1], [2, 2]]
    assert utils.prepare_chunk_offsets(cu, 2).tolist() == [0, 1, 1, 4]
    assert utils.prepare_chunk_indices(cu, 2).dtype == torch.int32


@pytest.mark.parametrize("shape", [(1, 63, 1, 16), (2, 70, 4, 32), (2, 100, 5, 64)])
def test_solve_tril(shape):
    A = torch.randn(shape)
    got, C = utils.solve_tril(A), shape[-1]
    for c in range(0, shape[1], C):
        n = min(C, shape[1] - c)
        L = A[:, c:c + n, :, :n].transpose(1, 2).double().tril(-1) + torch.eye(n).double()
        block = got[:, c:c + n, :, :n].transpose(1, 2).double()
        assert (L @ block - torch.eye(n)).abs().max() < 1e-4 * block.abs().max()
        assert (got[:, c:c + n, :, n:] == 0).all()


def test_solve_tril_of_packed_sequences():
    A = torch.randn(1, 50, 2, 16)
    got = utils.solve_tril(A, torch.tensor([0, 1, 20, 20, 45]))
    for begin, end in ((0, 1), (1, 20), (20, 45)):
        assert torch.equal(got[:, begin:end], utils.solve_tril(A[:, begin:end]))
    assert (got[:, 45:] == 0).all()
