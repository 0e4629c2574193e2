"""Kimi Delta Attention: arguments, closed forms, gates, and the corners of both."""

import inspect
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import gdn
import gdn.array
from harness import check, run, same, upstream

CHUNK, RECURRENT = gdn.chunk_kda, gdn.fused_recurrent_kda
both = pytest.mark.parametrize("function", [CHUNK, RECURRENT])


def tensors(B=2, T=70, H=1, HV=2, K=8, V=6, dtype=torch.float32, **more):
    x = dict(q=torch.randn(B, T, H, K), k=F.normalize(torch.randn(B, T, H, K), dim=-1), v=torch.randn(B, T, HV, V),
             g=-torch.rand(B, T, HV, K), beta=torch.rand(B, T, HV), initial_state=torch.randn(B, HV, K, V))
    x.update(more)
    return {n: t if t is None else t.to(dtype) for n, t in x.items()}


def gated(HV=2, K=8, **more):
    """Tensors for the gate in kernel."""
    x = tensors(HV=HV, K=K, **more)
    return {**x, "g": torch.randn_like(x["g"]), "A_log": torch.rand(HV), "dt_bias": torch.randn(HV, K)}


# ---------------------------------------------------------------- arguments

POSITIONAL = {
    CHUNK: "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel use_beta_sigmoid_in_kernel "
           "allow_neg_eigval safe_gate lower_bound disable_recompute return_intermediate_states state_v_first cu_seqlens cu_seqlens_cpu "
           "cp_context",
    RECURRENT: "q k v g beta A_log dt_bias scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel "
               "use_beta_sigmoid_in_kernel allow_neg_eigval lower_bound state_v_first cu_seqlens",
}


@both
@pytest.mark.parametrize("module", [gdn, gdn.array])
def test_signature(function, module):
    parameters = inspect.signature(getattr(module, function.__name__)).parameters.values()
    assert [p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD] == POSITIONAL[function].split()
    assert not [p for p in parameters if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]


@both
def test_documentation_names_every_argument(function):
    text = CHUNK.__doc__
    for name in inspect.signature(function).parameters:
        assert name in text, name


def test_positional_call_is_the_keyword_call():
    x = gated()
    common = [x[n] for n in ("q", "k", "v", "g", "beta")]
    names = dict(scale=0.3, initial_state=x["initial_state"].transpose(2, 3), output_final_state=True, use_qk_l2norm_in_kernel=True,
                 use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True, lower_bound=-2.0, state_v_first=True,
                 A_log=x["A_log"], dt_bias=x["dt_bias"])
    by_name = CHUNK(*common, **names)
    by_place = CHUNK(*common, 0.3, names["initial_state"], True, True, True, True, True, False, -2.0, False, False, True, A_log=x["A_log"],
                     dt_bias=x["dt_bias"])
    assert all(torch.equal(a, b) for a, b in zip(by_name, by_place))
    by_name = RECURRENT(*common, **names)
    by_place = RECURRENT(*common, x["A_log"], x["dt_bias"], 0.3, names["initial_state"], True, True, True, True, True, -2.0, True)
    assert all(torch.equal(a, b) for a, b in zip(by_name, by_place))


@both
def test_hints_change_nothing(function):
    x = gated()
    options = dict(use_gate_in_kernel=True, lower_bound=-4.0, output_final_state=True)
    plain = function(**x, **options)
    for hint in (dict(safe_gate=True), dict(disable_recompute=True), dict(chunk_size=32), dict(chunk_indices=torch.zeros(1, 2)),
                 dict(head_first=False), dict(backend="cpu")):
        assert all(torch.equal(a, b) for a, b in zip(plain, function(**x, **options, **hint))), hint


@both
def test_without_the_gate_its_arguments_are_not_looked_at(function):
    x = tensors()
    o, _ = function(**x)
    assert torch.equal(o, function(**x, A_log=torch.rand(3), dt_bias=torch.rand(5), lower_bound=-3.0)[0])
    assert torch.equal(o, function(**x, safe_gate=True)[0])


@both
@pytest.mark.parametrize("wrong, message", [
    (dict(lower_bound=0.0), "lower_bound is 0.0"), (dict(lower_bound=1.0), "lower_bound is 1.0"), (dict(lower_bound=math.nan), "lower_bound"),
    (dict(lower_bound=-math.inf), "lower_bound"), (dict(safe_gate=True), "safe_gate"), (dict(safe_gate=True, lower_bound=-5.5), "safe_gate"),
    (dict(A_log=None), "A_log"), (dict(g=None), "g is NULL"), (dict(dt_bias=torch.rand(15)), "dt_bias"), (dict(dt_bias=torch.rand(8, 2)), "dt_bias"),
    (dict(A_log=torch.rand(3)), "A_log"), (dict(g=torch.rand(2, 70, 2)), "g has rank 3"), (dict(g=torch.rand(2, 70, 2, 7)), "g has shape"),
    (dict(allow_neg_eigval=True), "neg_eigval"), (dict(chunk_size=48), "chunk_size"), (dict(scale=0), "scale is 0"),
    (dict(state_v_first=True, transpose_state_layout=True), "transpose_state_layout"), (dict(backend="npu"), "backend"),
    (dict(cu_seqlens=torch.tensor([0, 70])), "N=1"), (dict(cu_seqlens=torch.tensor([0, 70]), initial_state=None), "B=1"),
])
def test_wrong_argument(function, wrong, message):
    with pytest.raises(ValueError, match=message):
        function(**{**gated(), "use_gate_in_kernel": True, **wrong})


@both
def test_unknown_keyword(function):
    with pytest.raises(TypeError):
        function(**tensors(), colour=1)


@both
def test_head_first_is_refused(function):
    with pytest.raises(DeprecationWarning):
        function(**tensors(), head_first=True)


@both
def test_vectors_of_any_shape(function):
    x = gated(dtype=torch.float64)
    options = dict(use_gate_in_kernel=True)
    expected = function(**x, **options)[0]
    for A_log, dt_bias in ((x["A_log"].view(1, 1, 2, 1), x["dt_bias"].view(-1)), (x["A_log"].view(2, 1), x["dt_bias"].view(1, 1, 2, 8))):
        assert torch.equal(function(**{**x, "A_log": A_log, "dt_bias": dt_bias}, **options)[0], expected)


@both
def test_old_name_of_state_v_first(function):
    x = tensors()
    x["initial_state"] = x["initial_state"].transpose(2, 3)
    new = function(**x, output_final_state=True, state_v_first=True)
    with pytest.warns(DeprecationWarning):
        old = function(**x, output_final_state=True, transpose_state_layout=True)
    assert all(torch.equal(a, b) for a, b in zip(new, old))


@both
def test_arrays(function):
    x = gated()
    options = dict(use_gate_in_kernel=True, lower_bound=-5.0, output_final_state=True)
    expected = function(**x, **options)
    got = getattr(gdn.array, function.__name__)(**{n: t.numpy() for n, t in x.items()}, **options)
    for a, b in zip(got, expected):
        assert np.array_equal(a, b.numpy())


# ---------------------------------------------------------------- intermediate states

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("cu", [None, [0, 130, 130, 131, 195]])
def test_intermediate_states(cu, v_first, dtype):
    x = tensors(B=2 if cu is None else 1, T=197, dtype=dtype)
    x["initial_state"] = torch.randn(2 if cu is None else 4, 2, 8, 6)
    if v_first:
        x["initial_state"] = x["initial_state"].transpose(2, 3).contiguous()
    options = dict(state_v_first=v_first, output_final_state=True)
    index = None if cu is None else torch.tensor(cu)
    with torch.inference_mode():
        o, ht, h = CHUNK(**x, **options, cu_seqlens=index, return_intermediate_states=True)
    plain = CHUNK(**x, **options, cu_seqlens=index)
    assert torch.equal(o, plain[0]) and torch.equal(ht, plain[1])
    ends = [(b, 0, 197) for b in range(2)] if cu is None else [(0, a, z) for a, z in zip(cu, cu[1:])]
    states = []
    for n, (b, start, end) in enumerate(ends):
        for t in range(start, end, 64):
            piece = {name: y[b:b + 1, start:t] for name, y in x.items() if name != "initial_state"}
            states.append(CHUNK(**piece, initial_state=x["initial_state"][n:n + 1], **options)[1].to(dtype))
    assert h.dtype == dtype and h.shape == (2 if cu is None else 1, 4 if cu is None else 5, 2, *((6, 8) if v_first else (8, 6)))
    assert torch.equal(h.flatten(0, 1), torch.cat(states))
    if dtype != torch.bfloat16:  # NumPy has none
        arrays = {name: y.numpy() for name, y in x.items()}
        made = gdn.array.chunk_kda(**arrays, **options, cu_seqlens=None if cu is None else np.array(cu), return_intermediate_states=True)
        assert np.array_equal(made[2], h.numpy())


def test_intermediate_states_where_they_cannot_be():
    with pytest.raises(AssertionError, match="inference_mode"):
        CHUNK(**tensors(), return_intermediate_states=True)
    with torch.inference_mode(), pytest.raises(AssertionError, match="disable_recompute"):
        CHUNK(**tensors(), return_intermediate_states=True, disable_recompute=True)


# ---------------------------------------------------------------- closed forms

@both
def test_equal_gates_are_gated_delta_net(function):
    x = tensors(T=150, K=24, V=20)
    g = x["g"][..., 0]
    x["g"] = g[..., None].expand(*g.shape, 24)
    do, dht = upstream(x)
    options = dict(output_final_state=True, use_qk_l2norm_in_kernel=True)
    other = {CHUNK: gdn.chunk_gdn, RECURRENT: gdn.fused_recurrent_gdn}[function]
    mine, theirs = run(function, x, options, do, dht), run(other, {**x, "g": g}, options, do, dht)
    mine["dg"] = mine["dg"].sum(-1)
    for name, t in theirs.items():
        torch.testing.assert_close(mine[name], t, rtol=1e-4, atol=2e-5 * float(t.abs().max()))


@both
def test_one_token(function):
    x = tensors(T=1, dtype=torch.float64)
    q, k, v, g, beta, s = (t.squeeze(1) if t.dim() != 4 or t.shape[1] == 1 else t for t in x.values())
    s = g.exp()[..., None] * s
    error = v - torch.einsum("bhkv,bhk->bhv", s, k.expand(-1, 2, -1))
    o = torch.einsum("bhkv,bhk->bhv", s, q.expand(-1, 2, -1)) + beta[..., None] * (q * k).sum(-1, keepdim=True) * error
    torch.testing.assert_close(function(**x, scale=0.7)[0][:, 0], 0.7 * o, rtol=1e-12, atol=1e-12)


@both
def test_identical_keys_hold_the_last_value(function):
    x = tensors(g=torch.zeros(2, 70, 2, 8), beta=torch.ones(2, 70, 2), initial_state=None)
    x["k"] = x["k"][:, :1].expand(-1, 70, -1, -1)
    o, _ = function(**x, scale=0.5)
    torch.testing.assert_close(o, 0.5 * (x["q"] * x["k"]).sum(-1, keepdim=True) * x["v"], rtol=1e-4, atol=1e-5)


@both
def test_beta_two_reflects(function):
    x = tensors(g=None, beta=torch.full((2, 70, 2), 2.0), v=torch.zeros(2, 70, 2, 6))
    x["k"] = x["k"][:, :1].expand(-1, 70, -1, -1)
    torch.testing.assert_close(function(**x, output_final_state=True)[1], x["initial_state"], rtol=1e-4, atol=1e-4)


@both
def test_beta_zero_only_decays(function):
    x = tensors(beta=torch.zeros(2, 70, 2))
    o, _ = function(**x, scale=0.5)
    s = x["g"].cumsum(1).exp()[..., None] * x["initial_state"][:, None]
    torch.testing.assert_close(o, 0.5 * torch.einsum("bthkv,bthk->bthv", s, x["q"].expand(-1, -1, 2, -1)), rtol=1e-4, atol=1e-6)
    assert not run(function, x, {}, *upstream(x)[:1])["dv"].any()


@both
def test_orthonormal_keys_are_linear_attention(function):
    x = tensors(T=8, g=torch.zeros(2, 8, 2, 8), beta=torch.ones(2, 8, 2), initial_state=None)
    x["k"] = torch.eye(8)[None, :, None].expand(2, -1, -1, -1)
    scores = torch.einsum("bthk,bshk->bhts", x["q"], x["k"]).tril()
    torch.testing.assert_close(function(**x, scale=0.5)[0], 0.5 * torch.einsum("bhts,bshv->bthv", scores.expand(-1, 2, -1, -1), x["v"]),
                               rtol=1e-4, atol=1e-5)


@both
@pytest.mark.parametrize("cu", [None, [0, 1, 1, 66, 70]])
def test_no_gradient_of_the_first_gate(function, cu):
    x = tensors(B=1, initial_state=None)
    starts = [0] if cu is None else [a for a, z in zip(cu, cu[1:]) if z > a]
    options = {} if cu is None else {"cu_seqlens": torch.tensor(cu)}
    dg = run(function, {n: t for n, t in x.items() if t is not None}, options, *upstream(x)[:1])["dg"]
    assert not dg[:, starts].any()
    assert dg[:, [t for t in range(70) if t not in starts]].abs().amin((0, 2)).min() > 0


@both
def test_scale_and_values_are_linear(function):
    x = tensors()
    o, ht = function(**x, scale=0.25, output_final_state=True)
    twice_o, same_ht = function(**x, scale=0.5, output_final_state=True)
    assert torch.equal(twice_o, 2 * o) and torch.equal(same_ht, ht)
    o2, ht2 = function(**{**x, "v": 2 * x["v"], "initial_state": 2 * x["initial_state"]}, scale=0.25, output_final_state=True)
    torch.testing.assert_close(o2, 2 * o)
    torch.testing.assert_close(ht2, 2 * ht)


@both
@pytest.mark.parametrize("cut", [1, 7, 16, 63, 64, 65])
def test_split(function, cut):
    x = tensors(dtype=torch.float32)
    o, ht = function(**x, output_final_state=True)
    first = {n: t[:, :cut] if n != "initial_state" else t for n, t in x.items()}
    o1, state = function(**first, output_final_state=True)
    o2, last = function(**{n: t[:, cut:] if n != "initial_state" else state for n, t in x.items()}, output_final_state=True)
    torch.testing.assert_close(torch.cat([o1, o2], 1), o, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last, ht, rtol=1e-4, atol=1e-5)


@both
def test_packed_is_one_by_one(function):
    cu = [0, 3, 3, 68, 70]
    x = tensors(B=1, T=72, initial_state=torch.randn(4, 2, 8, 6))
    for name in ("q", "k", "v", "g", "beta"):
        x[name][:, 70:] = math.nan
    do, dht = upstream(x, 4)
    do[:, 70:] = math.nan
    whole = run(function, x, dict(cu_seqlens=torch.tensor(cu), output_final_state=True), do, dht)
    assert all(not t[:, 70:].any() for name, t in whole.items() if name not in ("ht", "dh0"))
    for n, (a, z) in enumerate(zip(cu, cu[1:])):
        part = {name: t[n:n + 1] if name == "initial_state" else t[:, a:z] for name, t in x.items()}
        alone = run(function, part, dict(output_final_state=True), do[:, a:z], dht[n:n + 1])
        same(alone, {name: t[n:n + 1] if name in ("ht", "dh0") else t[:, a:z] for name, t in whole.items()})


# ---------------------------------------------------------------- gates

def held(function, x, **options):
    do, dht = upstream(x)
    return check(function, x, dict(options, output_final_state=True), do, dht)


@both
@pytest.mark.parametrize("options", [{}, {"lower_bound": -5.0}, {"lower_bound": -0.1}, {"lower_bound": -30.0}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_gate_in_kernel(function, options, dtype):
    x = gated(T=90, H=2, HV=4, K=24, V=20)
    wide = ("A_log", "dt_bias", "initial_state")
    x = {n: t.to(torch.float64 if dtype == torch.float64 else torch.float32) if n in wide else t.to(dtype) for n, t in x.items()}
    held(function, x, use_gate_in_kernel=True, **options)


@both
@pytest.mark.parametrize("bias", [False, True])
def test_lower_bound_alone(function, bias):
    x = gated(T=40)
    del x["A_log"]
    if not bias:
        del x["dt_bias"]
    held(function, x, use_gate_in_kernel=True, lower_bound=-5.0)


@both
@pytest.mark.parametrize("options", [{}, {"lower_bound": -5.0}])
@pytest.mark.parametrize("raw", [-math.inf, -1e30, -1e4, -200.0, -90.0, 90.0, 1e4, 1e30])
def test_raw_gates_of_any_size(function, raw, options):
    x = gated(T=40)
    x["g"][:, ::3, :, ::2] = raw
    finite = {**x, "g": x["g"].clamp(min=-1e30)}  # as good as infinite, and autograd's rules hold for the reference
    found = held(function, finite, use_gate_in_kernel=True, **options)
    do, dht = upstream(x)
    options = dict(options, use_gate_in_kernel=True, output_final_state=True)
    same(run(function, x, options, do, dht), run(function, finite, options, do, dht))
    assert all(t.isfinite().all() for t in found.values())


@both
@pytest.mark.parametrize("amplitude", [-math.inf, 60.0, 100.0])
@pytest.mark.parametrize("options", [{}, {"lower_bound": -5.0}])
def test_amplitudes_of_any_size(function, amplitude, options):
    x = gated(T=40, A_log=None)
    x["A_log"] = torch.tensor([amplitude, 0.5])
    x["g"][:, 3] = -math.inf
    x["g"][:, 5] = -x["dt_bias"]  # the raw gate with its bias is 0
    do, dht = upstream(x)
    found = run(function, x, dict(use_gate_in_kernel=True, output_final_state=True, **options), do, dht)
    assert all(not t.isnan().any() for t in found.values())
    assert found["o"].isfinite().all() and found["dq"].isfinite().all()


@both
@pytest.mark.parametrize("g", [-5.0, -11.2, -20.0, -60.0, -1000.0, -1e30])
def test_constant_gate(function, g):
    held(function, tensors(T=75, g=torch.full((2, 75, 2, 8), g)))


@both
def test_strong_channels_among_weak_ones(function):
    x = tensors(T=140, K=24, V=20)
    x["g"] = torch.where(torch.rand_like(x["g"]) < 0.3, -5 - 25 * torch.rand_like(x["g"]), -0.1 * torch.rand_like(x["g"]))
    held(function, x)


@both
def test_resets(function):
    x = tensors(T=140, K=24, V=20)
    x["g"] = torch.where(torch.rand_like(x["g"]) < 0.05, torch.tensor(-math.inf), -0.1 * torch.rand_like(x["g"]))
    x["g"][:, 77] = -math.inf  # all channels: what came before is gone
    found = held(function, x)
    after = function(**{n: t[:, 77:] for n, t in x.items() if n != "initial_state"})[0]
    torch.testing.assert_close(found["o"][:, 77:], after, rtol=1e-5, atol=1e-6)
    assert not found["dg"][:, 77].any()


@both
def test_beta_per_value_channel(function):
    held(function, tensors(beta=torch.rand(2, 70, 2, 6)))
    held(function, tensors(beta=torch.randn(2, 70, 2, 6)), use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True)


@both
def test_no_gate_no_beta(function):
    x = tensors()
    held(function, {n: t for n, t in x.items() if n not in ("g", "beta")})
    assert torch.equal(function(**{**x, "g": None})[0], function(**{**x, "g": torch.zeros_like(x["g"])})[0])


@both
@pytest.mark.parametrize("noise", [0, 1e-2])
@pytest.mark.parametrize("beta", [1.0, 1.9])
def test_near_collinear_keys(function, noise, beta):
    x = tensors(T=130, K=32, V=16, beta=torch.full((2, 130, 2), beta), g=torch.zeros(2, 130, 2, 32))
    x["k"] = F.normalize(x["k"][:, :1] + noise * torch.randn_like(x["k"]), dim=-1)
    x["g"] = -0.01 * torch.rand_like(x["g"])
    held(function, x)


@both
@pytest.mark.parametrize("size", [(1, 1), (1, 33), (33, 1), (60, 60), (100, 100), (128, 128), (256, 200)])
def test_sizes(function, size):
    held(function, tensors(B=1, T=37, K=size[0], V=size[1], HV=1))


@both
def test_every_tail(function):
    for T in range(0, 34):
        held(function, tensors(B=1, T=T, K=4, V=3, HV=1))


# ---------------------------------------------------------------- gradients

@both
@pytest.mark.parametrize("options", [
    {}, {"state_v_first": True}, {"use_qk_l2norm_in_kernel": True, "scale": 0.3}, {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True},
    {"use_gate_in_kernel": True}, {"use_gate_in_kernel": True, "lower_bound": -2.0}, {"cu_seqlens": torch.tensor([0, 2, 2, 6])},
])
def test_gradcheck(function, options):
    h0 = torch.randn(3 if "cu_seqlens" in options else 1, 2, 3, 2)
    x = tensors(B=1, T=6, K=3, V=2, dtype=torch.float64, initial_state=h0.transpose(2, 3) if options.get("state_v_first") else h0)
    if options.get("use_gate_in_kernel"):
        x.update(A_log=torch.rand(2).double(), dt_bias=torch.rand(6).double())
    x = {n: t.requires_grad_() for n, t in x.items()}
    names = list(x)
    assert torch.autograd.gradcheck(lambda *t: function(**dict(zip(names, t)), output_final_state=True, **options), list(x.values()))


@both
def test_compile_with_every_option(function):
    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    for T, cu in ((40, [0, 3, 3, 39]), (61, [0, 30, 60, 61])):
        x = {n: t.requires_grad_() for n, t in gated(B=1, T=T, initial_state=torch.randn(3, 2, 6, 8)).items()}
        options = dict(cu_seqlens=torch.tensor(cu), use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
                       allow_neg_eigval=True, state_v_first=True, scale=0.7, lower_bound=-5.0, safe_gate=True, output_final_state=True)
        results = []
        for f in (compiled, function):
            o, ht = f(**x, **options)
            results.append([o, ht, *torch.autograd.grad(o.sin().sum() + ht.square().sum(), list(x.values()))])
        for got, expected in zip(*results):
            assert torch.equal(got, expected)


@both
def test_no_second_derivative(function):
    x = {n: t.requires_grad_() for n, t in tensors(T=5).items()}
    o, _ = function(**x)
    first, = torch.autograd.grad(o.square().sum(), x["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        first.sum().backward()
