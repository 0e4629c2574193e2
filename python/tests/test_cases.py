"""Failures that other implementations have had, each as its smallest input, and identities that need no reference. `check` compares outputs
and all gradients with the float64 recurrence."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import gdn
import gdn.array
import reference
from harness import check, child, expected, run, same, upstream

f32, f16, bf16, f64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
chunk, recurrent = gdn.chunk_gated_delta_rule, gdn.fused_recurrent_gated_delta_rule
both = pytest.mark.parametrize("function", [chunk, recurrent], ids=["chunk", "recurrent"])
FINAL = {"output_final_state": True}


def unit(*shape):
    return F.normalize(torch.randn(*shape), dim=-1)


def make(B, T, H, HV, K, V, dtype=f32, state=True, sequences=None):
    """Unit keys and queries, mild gates, beta in (0, 1)."""
    tensors = dict(q=unit(B, T, H, K).to(dtype), k=unit(B, T, H, K).to(dtype), v=torch.randn(B, T, HV, V).to(dtype),
                   g=F.logsigmoid(torch.randn(B, T, HV)), beta=torch.rand(B, T, HV))
    if state:
        tensors["initial_state"] = torch.randn(B if sequences is None else sequences, HV, K, V)
    return tensors


def packed(cu, H, HV, K, V, dtype=f32, index=torch.int64):
    return dict(make(1, cu[-1], H, HV, K, V, dtype, sequences=len(cu) - 1), cu_seqlens=torch.tensor(cu, dtype=index))


def alone(tensors, cu, n):
    """Sequence n of a packed call, as a call of its own."""
    piece = {name: t[:, cu[n]:cu[n + 1]] for name, t in tensors.items() if name not in ("initial_state", "cu_seqlens")}
    return dict(piece, initial_state=tensors["initial_state"][n:n + 1])


def rows(found, cu, n):
    return {name: t[n:n + 1] if name in ("ht", "dh0") else t[:, cu[n]:cu[n + 1]] for name, t in found.items()}


def each_alone(function, tensors, cu, do, dht):
    """Holds a packed call to separate ones, in every bit."""
    found = run(function, tensors, FINAL, do, dht)
    for n in range(len(cu) - 1):
        separate = run(function, alone(tensors, cu, n), FINAL, do[:, cu[n]:cu[n + 1]], dht[n:n + 1])
        same(rows(found, cu, n), separate)
    return found


# Order of the operations

@both
def test_decay_error_write_read(function):
    tensors = make(1, 1, 1, 1, 4, 4)
    tensors.update(g=torch.tensor([[[-1.0]]]), beta=torch.tensor([[[0.7]]]))
    q, k, v = (tensors[name][0, 0, 0].double() for name in "qkv")
    decayed = math.exp(-1.0) * tensors["initial_state"][0, 0].double()
    state = decayed + 0.7 * torch.outer(k, v - decayed.T @ k)
    found = run(function, tensors, FINAL)
    reference.check("ht", state[None, None], found["ht"], 1e-6)
    reference.check("o", (state.T @ q)[None, None, None] * 0.5, found["o"], 1e-6)


@both
def test_gate_zero_has_the_bits_of_no_gate(function):
    tensors = make(1, 128, 2, 2, 100, 100, bf16)
    tensors["g"] = torch.zeros(1, 128, 2)
    do, dht = upstream(tensors)
    zero = check(function, tensors, FINAL, do, dht)
    del tensors["g"], zero["dg"]
    same(run(function, tensors, FINAL, do, dht), zero)


# Gates

@both
@pytest.mark.parametrize("g", [-5.0, -5.8, -6.0, -20.0, -27.6, -60.0, -1000.0, -1e30])
@pytest.mark.parametrize("T", [33, 65])
def test_constant_gate(T, g, function):
    """Whatever the decay, nothing overflows, and the gradient of a gate that decides almost nothing keeps its digits."""
    tensors = make(1, T, 1, 1, 8, 8)
    tensors["g"] = torch.full((1, T, 1), g)
    check(function, tensors, FINAL, *upstream(tensors))


@both
def test_strong_gates_between_none(function):
    tensors = make(1, 64, 1, 1, 16, 16)
    tensors["g"] = torch.where(torch.rand(1, 64, 1) < 0.5, 0.0, -60.0)
    check(function, tensors, FINAL, *upstream(tensors))


@both
@pytest.mark.parametrize("T", [17, 75])
def test_wild_gates_and_a_tail(T, function):
    tensors = make(1, T, 2, 2, 32, 32)
    tensors["g"] = F.logsigmoid(torch.randn(1, T, 2)) / 0.01
    check(function, tensors, FINAL, *upstream(tensors))


@both
def test_tiny_decay_then_none(function):
    tensors = make(1, 2, 1, 1, 8, 8)
    tensors["g"] = torch.tensor([math.log(6.5e-12), 0.0]).reshape(1, 2, 1)
    check(function, tensors, FINAL, *upstream(tensors))


@both
@pytest.mark.parametrize("at", [0, 20, 63, 64, 129])
def test_reset(at, function):
    """g = -inf forgets: what follows is a sequence of its own, and no gradient crosses."""
    T, H, K, V = 130, 2, 16, 24
    tensors = make(1, T, 1, H, K, V)
    tensors["g"][:, at] = -math.inf
    do, dht = upstream(tensors)
    found = check(function, tensors, FINAL, do, dht)
    assert not found["dg"][:, at].any()
    after = alone(tensors, [at, T], 0)
    del after["initial_state"]
    after["g"] = after["g"].clone()
    after["g"][:, 0] = 0
    fresh = run(function, after, FINAL, do[:, at:], dht)
    for name, t in fresh.items():
        reference.check(name, t, found[name] if name == "ht" else found[name][:, at:])


@both
def test_pure_delta_rule_does_not_drift(function):
    tensors = make(1, 2048, 1, 1, 32, 32)
    tensors.update(g=torch.zeros(1, 2048, 1), beta=torch.ones(1, 2048, 1))
    check(function, tensors, FINAL, *upstream(tensors))


@both
@pytest.mark.parametrize("dtype", [f32, bf16])
def test_gate_amplitude_zero(dtype, function):
    """A_log = -inf is an amplitude of 0: no decay on that head, no gradient through its gate, the others untouched."""
    tensors = make(1, 70, 1, 3, 16, 16)
    tensors.update(g=torch.randn(1, 70, 3), A_log=torch.tensor([0.5, -math.inf, 1.0]).to(dtype), dt_bias=torch.randn(3))
    do, dht = upstream(tensors)
    found = run(function, tensors, dict(FINAL, use_gate_in_kernel=True), do, dht)
    assert all(t.isfinite().all() for t in found.values())
    assert not found["dA_log"][1] and not found["ddt_bias"][1] and not found["dg"][:, :, 1].any()
    A_log = tensors["A_log"].double()
    A_log[1] = -2000.0  # exp of which is 0 in float64, and its product with anything defined
    want = expected(dict(tensors, A_log=A_log), dict(use_gate_in_kernel=True), do, dht)
    for name, t in found.items():
        reference.check(name, want[name], t)


@both
def test_second_call_with_another_dtype_of_gate(function):
    tensors = make(1, 1500, 1, 1, 32, 32)
    do, dht = upstream(tensors)
    check(function, tensors, FINAL, do, dht)
    tensors["g"] = tensors["g"].to(bf16)
    assert check(function, tensors, FINAL, do, dht)["dg"].dtype == bf16


# Keys that resemble one another

@both
@pytest.mark.parametrize("noise", [0, 1e-2])
@pytest.mark.parametrize("beta", [1.0, 1.9])
def test_near_collinear_keys(beta, noise, function):
    T, K = 64, 32
    key = unit(1, 1, 1, K)
    tensors = make(1, T, 1, 1, K, K, state=False)
    tensors.update(k=F.normalize(key + noise * torch.randn(1, T, 1, K), dim=-1), g=torch.zeros(1, T, 1), beta=torch.full((1, T, 1), beta))
    do, dht = upstream(tensors)
    if beta != 1 or noise:
        check(function, tensors, dict(FINAL, scale=0.5), do, dht)
        return
    # The state holds the last value only, so that no decay matters: what a gate does to the read and to the error, v_{t-1}.dv_t each,
    # cancels, and the rest is judged by their size.
    found, want = run(function, tensors, dict(FINAL, scale=0.5), do, dht), expected(tensors, dict(scale=0.5), do, dht)
    cancelled = (tensors["v"][:, :-1].double() * want["dv"][:, 1:]).sum(-1)
    assert found.pop("dg")[:, 1:].double().square().mean() <= (reference.BOUNDS[f32] ** 2 * cancelled.square()).mean()
    for name, t in found.items():
        reference.check(name, want[name], t)
    reference.check("o", 0.5 * (tensors["q"].double() * key.double()).sum(-1, keepdim=True) * tensors["v"].double(), found["o"])


# Lengths

@both
def test_every_tail(function):
    for T in range(65, 80):
        tensors = make(1, T, 1, 1, 32, 32)
        check(function, tensors, FINAL, *upstream(tensors))


@both
def test_no_tokens(function):
    tensors = make(2, 0, 1, 2, 8, 12)
    do, dht = upstream(tensors)
    found = run(function, tensors, FINAL, do, dht)
    assert found["o"].shape == (2, 0, 2, 12) and found["dq"].shape == (2, 0, 1, 8)
    assert torch.equal(found["ht"], tensors["initial_state"]) and torch.equal(found["dh0"], dht)
    del tensors["initial_state"]
    assert not run(function, tensors, FINAL)["ht"].any()


def guarded(values, fill=math.nan):
    """A copy with 64 NaN before and after it: (copy, what checks that the NaN are untouched)."""
    memory = np.full(values.size + 128, fill, values.dtype)
    inner = memory[64:64 + values.size].reshape(values.shape)
    inner[...] = values

    def intact():
        return bool(np.isnan(memory[:64]).all() and np.isnan(memory[-64:]).all())
    return inner, intact


@pytest.mark.parametrize("forward,backward", [("fwd", "bwd"), ("recurrent_fwd", "recurrent_bwd")])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_nothing_beyond_the_ends(dtype, forward, backward):
    """Every length up to 70 between NaN: neither read by the kernels nor written to."""
    rng = np.random.default_rng(42)
    H, HV, K, V = 1, 2, 12, 20
    for T in range(1, 71):
        plain = {"q": rng.standard_normal((1, T, H, K)) / 4, "k": rng.standard_normal((1, T, H, K)) / 4,
                 "v": rng.standard_normal((1, T, HV, V)), "g": -rng.random((1, T, HV)), "beta": rng.random((1, T, HV)),
                 "initial_state": rng.standard_normal((1, HV, K, V))}
        plain = {name: x.astype(dtype) for name, x in plain.items()}
        ups = {"dout": rng.standard_normal((1, T, HV, V)).astype(dtype), "dht": rng.standard_normal((1, HV, K, V)).astype(np.float32)}
        made = getattr(gdn.array, forward)(**plain, output_final_state=True, save=True)
        gradients = getattr(gdn.array, backward)(**plain, **ups, tape=made["tape"])
        checks = []

        def fence(arrays, empty=False):
            fenced = {}
            for name, x in arrays.items():
                fenced[name], intact = guarded(np.full_like(x, math.nan) if empty else x)
                checks.append((name, intact))
            return fenced

        inputs, outputs = fence(plain), fence(made, empty=True)
        getattr(gdn.array, forward)(**inputs, output_final_state=True, save=True, out=outputs)
        outputs_back = fence(gradients, empty=True)
        getattr(gdn.array, backward)(**inputs, **fence(ups), tape=outputs["tape"], out=outputs_back)
        for name, x in {**made, **gradients}.items():
            if name != "tape":  # may have gaps
                assert np.array_equal({**outputs, **outputs_back}[name], x), f"{name}, T={T}"
        for name, intact in checks:
            assert intact(), f"{name}, T={T}: written beyond its end"


AT_THE_END_OF_A_PAGE = """
import ctypes, mmap
import numpy as np
import gdn.array

libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
kept = []

def place(x, at_end):
    "A copy that ends where memory ends, or begins where it begins."
    page = mmap.PAGESIZE
    size = -(-max(x.nbytes, 1) // page) * page
    memory = mmap.mmap(-1, size + 2 * page)
    kept.append(memory)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for guard in (base, base + page + size):
        assert libc.mprotect(guard, page, 0) == 0
    y = np.frombuffer(memory, x.dtype, x.size, page + (size - x.nbytes if at_end else 0)).reshape(x.shape)
    y[...] = x
    return y

rng = np.random.default_rng(42)
H, HV, K, V = 1, 2, 20, 12
for dtype in (np.float32, np.float16):
    for T in (1, 2, 3, 4, 5, 6, 7, 8, 63, 64, 65, 127, 128, 129):
        for at_end in (True, False):
            x = dict(q=rng.random((1, T, H, K)) / 4, k=rng.random((1, T, H, K)) / 4, v=rng.random((1, T, HV, V)), g=-rng.random((1, T, HV)),
                     beta=rng.random((1, T, HV)), initial_state=rng.random((1, HV, K, V)))
            x = {name: place(y.astype(dtype), at_end) for name, y in x.items()}
            for forward, backward in ((gdn.array.fwd, gdn.array.bwd), (gdn.array.recurrent_fwd, gdn.array.recurrent_bwd)):
                made = forward(**x, output_final_state=True, save=True)
                out = {name: place(y, at_end) for name, y in made.items()}
                forward(**x, output_final_state=True, save=True, out=out)
                ups = dict(dout=place(rng.random((1, T, HV, V)).astype(dtype), at_end),
                           dht=place(rng.random((1, HV, K, V)).astype(np.float32), at_end))
                back = backward(**x, **ups, tape=out["tape"])
                backward(**x, **ups, tape=out["tape"], out={name: place(y, at_end) for name, y in back.items()})
print("done")
"""


def test_against_guard_pages():
    """All lengths with every array against memory that may not be touched, in a process of its own, for a fault would end it."""
    assert child(AT_THE_END_OF_A_PAGE).stdout == "done\n"


@both
def test_wide_heads(function):
    tensors = make(1, 70, 1, 2, 256, 512)
    check(function, tensors, FINAL, *upstream(tensors))


@both
def test_chunk_size(function):
    tensors = make(1, 96, 2, 2, 32, 32)
    do, dht = upstream(tensors)
    for size in (16, 32, 64):
        check(function, tensors, dict(FINAL, chunk_size=size), do, dht)


# Head groups

@both
def test_value_heads_are_interleaved(function):
    tensors = make(1, 70, 2, 6, 16, 24)
    do, dht = upstream(tensors)
    found = check(function, tensors, FINAL, do, dht)
    spread = run(function, {**tensors, **{name: tensors[name].repeat_interleave(3, 2) for name in "qk"}}, FINAL, do, dht)
    reference.check("o", spread["o"], found["o"])
    for name in ("dq", "dk"):
        reference.check(name, spread[name].double().unflatten(2, (2, 3)).sum(3), found[name])
    tiled = run(function, {**tensors, **{name: tensors[name].repeat(1, 1, 3, 1) for name in "qk"}}, FINAL)
    assert reference.error(tiled["o"], found["o"]) > 0.1


@both
def test_olmo_hybrid_heads(function):
    """K = 96, V = 192, 30 heads, beta up to 2."""
    tensors = make(1, 150, 30, 30, 96, 192)
    tensors["beta"] = 2 * tensors["beta"]
    check(function, tensors, FINAL, *upstream(tensors), heads=[0, 29])


# Packed sequences

@both
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("cu", [[0, 5, 5, 9], [0, 0, 5, 5, 5, 69, 69]], ids=str)
def test_empty_sequences(cu, index, function):
    tensors = packed(cu, 1, 2, 8, 12, index=index)
    do, dht = upstream(tensors, len(cu) - 1)
    found = each_alone(function, tensors, cu, do, dht)
    empty = [n for n in range(len(cu) - 1) if cu[n] == cu[n + 1]]
    assert torch.equal(found["ht"][empty], tensors["initial_state"][empty]) and torch.equal(found["dh0"][empty], dht[empty])
    del tensors["initial_state"]
    assert not run(function, tensors, FINAL)["ht"][empty].any()


@both
def test_second_sample_alone(function):
    tensors = packed([0, 3, 9], 1, 2, 8, 8)
    each_alone(function, tensors, [0, 3, 9], *upstream(tensors, 2))


@both
@pytest.mark.parametrize("dtype", [f32, bf16])
@pytest.mark.parametrize("cu", [[0, 40, 89], [0, 640, 1423]], ids=str)
def test_gradients_of_the_second_sequence(cu, dtype, function):
    tensors = packed(cu, 1, 2, 32, 32, dtype)
    each_alone(function, tensors, cu, *upstream(tensors, 2))


@both
def test_tiny_and_long_sequences(function):
    cu = [0]
    for length in (2049, 1011, 513, 256, 128, 65, 32, 16, 8, 4, 5, 1):
        cu.append(cu[-1] + length)
    tensors = packed(cu, 2, 2, 64, 64, bf16)
    each_alone(function, tensors, cu, *upstream(tensors, len(cu) - 1))


@both
@pytest.mark.parametrize("N,T,H,K", [pytest.param(2050, 16, 32, 16, marks=pytest.mark.slow), (70000, 1, 1, 16)])
def test_more_sequences_than_a_grid_has(N, T, H, K, function):
    cu = [n * T for n in range(N + 1)]
    tensors = packed(cu, H, H, K, K)
    do, dht = upstream(tensors, N)
    found = run(function, tensors, FINAL, do, dht)
    half = N // 2
    for first, last in ((0, half), (half, N)):
        piece = alone(tensors, [first * T, last * T], 0)
        piece.update(initial_state=tensors["initial_state"][first:last], cu_seqlens=torch.tensor(cu[:last - first + 1]))
        part = run(function, piece, FINAL, do[:, first * T:last * T], dht[first:last])
        same(part, {n: t[first:last] if n in ("ht", "dh0") else t[:, first * T:last * T] for n, t in found.items()})


@pytest.fixture
def poisoned():
    """New tensors are full of NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(4).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@both
@pytest.mark.parametrize("dtype", [f32, bf16])
def test_rows_past_the_last_offset(dtype, function, poisoned):
    tensors = make(1, 10, 1, 2, 8, 12, dtype)
    do, dht = upstream(tensors)
    clean = run(function, {**{n: t if n == "initial_state" else t[:, :8] for n, t in tensors.items()}}, FINAL, do[:, :8], dht)
    for t in (*(t for name, t in tensors.items() if name != "initial_state"), do):
        t[:, 8:] = math.nan
    found = run(function, dict(tensors, cu_seqlens=torch.tensor([0, 8])), FINAL, do, dht)
    for name, t in found.items():
        if name not in ("ht", "dh0"):
            assert not t[:, 8:].any(), name  # NaN counts as any
            t = t[:, :8]
        assert torch.equal(t, clean[name]), name


# States

@both
def test_both_state_layouts(function):
    tensors = make(2, 70, 1, 2, 8, 12)
    do, dht = upstream(tensors)
    first = check(function, tensors, FINAL, do, dht)
    swapped = dict(tensors, initial_state=tensors["initial_state"].transpose(2, 3).contiguous())
    found = check(function, swapped, dict(FINAL, state_v_first=True), do, dht.transpose(2, 3).contiguous())
    assert found["ht"].shape == (2, 2, 12, 8)
    same(first, {name: t.transpose(2, 3) if name in ("ht", "dh0") else t for name, t in found.items()})
    with pytest.raises(ValueError, match="initial_state.*12 8.*expected"):
        function(**swapped)
    with pytest.raises(ValueError, match="initial_state.*8 12.*expected"):
        function(**tensors, state_v_first=True)


@both
@pytest.mark.parametrize("B,cu", [(2, None), (1, [0, 4, 8])])
def test_final_state_of_every_sequence(B, cu, function):
    tensors = make(B, 8 // B, 1, 3, 16, 8, sequences=2)
    whole = run(function, dict(tensors, **({"cu_seqlens": torch.tensor(cu)} if cu else {})), FINAL)
    assert whole["ht"].shape == (2, 3, 16, 8) and whole["ht"].dtype == f32
    for n in range(2):
        one = {name: t[:, 4 * n:4 * n + 4] if cu and t.dim() < 5 and name != "initial_state" else t[n:n + 1] for name, t in tensors.items()}
        assert torch.equal(run(function, one, FINAL)["ht"], whole["ht"][n:n + 1])


@pytest.mark.parametrize("first,second", [(chunk, chunk), (chunk, recurrent), (recurrent, chunk), (recurrent, recurrent)])
def test_split_anywhere(first, second):
    """A prefill and then the rest by the state is the whole, wherever the cut."""
    T = 70
    tensors = make(2, T, 1, 2, 16, 16)
    whole = run(first, tensors, FINAL)
    for cut in range(1, T):
        head = run(first, {n: t if n == "initial_state" else t[:, :cut] for n, t in tensors.items()}, FINAL)
        rest = {n: head["ht"] if n == "initial_state" else t[:, cut:] for n, t in tensors.items()}
        tail = run(second, rest, FINAL)
        reference.check("ht", whole["ht"], tail["ht"], 1e-6)
        reference.check("o", whole["o"], torch.cat([head["o"], tail["o"]], 1), 1e-6)


def test_prefill_and_one_token():
    tensors = make(1, 6, 1, 1, 128, 128)
    whole = run(chunk, tensors, FINAL)
    head = run(chunk, {n: t if n == "initial_state" else t[:, :5] for n, t in tensors.items()}, FINAL)
    tail = run(recurrent, {n: head["ht"] if n == "initial_state" else t[:, 5:] for n, t in tensors.items()}, FINAL)
    reference.check("o", whole["o"][:, 5:], tail["o"], 1e-6)
    reference.check("ht", whole["ht"], tail["ht"], 1e-6)


@both
def test_state_stays_float32_between_tokens(function):
    T = 512
    tensors = make(1, T, 1, 1, 64, 64, bf16)
    whole = run(function, tensors, FINAL)
    state, outputs = tensors["initial_state"], []
    for t in range(T):
        one = run(recurrent, {n: state if n == "initial_state" else x[:, t:t + 1] for n, x in tensors.items()}, FINAL)
        assert one["ht"].dtype == f32
        state = one["ht"]
        outputs.append(one["o"])
    reference.check("ht", whole["ht"], state, 1e-5)
    reference.check("o", whole["o"], torch.cat(outputs, 1))


# Layouts of memory

@both
def test_views_have_the_bits_of_copies(function):
    B, T, H, HV, K, V = 2, 70, 2, 4, 24, 40
    tensors = make(B, T, H, HV, K, V)
    views = dict(q=torch.randn(B, H, T, K).transpose(1, 2), k=(torch.randn(B, T, 3, H, 2 * K) / 8)[:, :, 1, :, ::2],
                 v=torch.randn(1, T, HV, V).expand(B, T, HV, V), g=F.logsigmoid(torch.randn(HV, T, B)).permute(2, 1, 0),
                 beta=torch.rand(1, 1, HV).expand(B, T, HV), initial_state=torch.randn(B, HV, V, K).transpose(2, 3))
    assert not any(t.is_contiguous() for t in views.values()) and all(t.shape == tensors[n].shape for n, t in views.items())
    do, dht = torch.randn(B, T, V, HV).transpose(2, 3), torch.randn(B, HV, V, K).transpose(2, 3)
    found = run(function, views, FINAL, do, dht)
    same(run(function, {name: t.contiguous() for name, t in views.items()}, FINAL, do.contiguous(), dht.contiguous()), found)


@both
def test_expanded_upstream_gradient(function):
    tensors = make(1, 70, 1, 2, 16, 16)
    leaves = {name: t.requires_grad_() for name, t in tensors.items()}
    o, ht = function(**leaves, **FINAL)
    found = torch.autograd.grad(o.sum() + ht.sum(), list(leaves.values()), retain_graph=True)  # gradients of stride 0
    plain = torch.autograd.grad([o, ht], list(leaves.values()), [torch.ones_like(o), torch.ones_like(ht)])
    assert all(torch.equal(a, b) for a, b in zip(found, plain))


# Repetition

@both
def test_same_bits_every_time(function):
    tensors = make(2, 200, 2, 4, 32, 32, bf16)
    do, dht = upstream(tensors)
    first = run(function, tensors, FINAL, do, dht)
    for _ in range(50):
        same(run(function, tensors, FINAL, do, dht), first)


# Identities

@both
@pytest.mark.parametrize("dtype", [f32, f64])
def test_one_token(dtype, function):
    """o = s [q.S~ + beta (q.k) (v - k.S~)]"""
    tensors = {name: t.to(dtype) for name, t in make(3, 1, 2, 4, 16, 24).items()}
    found = run(function, tensors, dict(FINAL, scale=0.3))
    q, k, v = (tensors[name].double()[:, 0] for name in "qkv")
    q, k = q.repeat_interleave(2, 1), k.repeat_interleave(2, 1)
    decayed = tensors["g"].double()[:, 0, :, None, None].exp() * tensors["initial_state"].double()

    def read(x):
        return (x[..., None] * decayed).sum(-2)
    o = 0.3 * (read(q) + tensors["beta"].double()[:, 0, :, None] * (q * k).sum(-1, keepdim=True) * (v - read(k)))
    reference.check("o", o[:, None], found["o"], 1e-6 if dtype == f32 else 1e-14)


@both
def test_two_reflections(function):
    """beta = 2, v = 0 and one unit key reflect the state: an even number of tokens gives it back."""
    T, K = 70, 32
    tensors = make(1, T, 1, 1, K, K)
    tensors.update(k=unit(1, 1, 1, K).expand(1, T, 1, K), v=torch.zeros(1, T, 1, K), g=torch.zeros(1, T, 1), beta=torch.full((1, T, 1), 2.0))
    reference.check("ht", tensors["initial_state"], run(function, tensors, FINAL)["ht"])


@both
def test_nothing_written(function):
    """beta = 0: o_t = s q_t D_t .. D_1 S0, and v has no influence."""
    tensors = make(1, 70, 1, 2, 16, 24)
    tensors["beta"] = torch.zeros(1, 70, 2)
    found = run(function, tensors, dict(FINAL, scale=0.5), *upstream(tensors))
    decay = tensors["g"].double().cumsum(1).exp()[..., None]
    o = 0.5 * decay * torch.einsum("btk,bhkv->bthv", tensors["q"][:, :, 0].double(), tensors["initial_state"].double())
    reference.check("o", o, found["o"])
    assert not found["dv"].any()


@both
def test_orthonormal_keys(function):
    """o = s tril(Q K^T) V"""
    T = K = 64
    tensors = make(1, T, 1, 1, K, 24, state=False)
    tensors.update(k=torch.linalg.qr(torch.randn(K, K, dtype=f64))[0][:T].float().reshape(1, T, 1, K), g=torch.zeros(1, T, 1),
                   beta=torch.ones(1, T, 1))
    q, k, v = (tensors[name][0, :, 0].double() for name in "qkv")
    found = run(function, tensors, {})
    reference.check("o", (K ** -0.5 * (q @ k.T).tril() @ v).reshape(1, T, 1, 24), found["o"])


@both
@pytest.mark.parametrize("dtype", [f32, bf16, f64])
@pytest.mark.parametrize("cu", [None, [0, 1, 30, 130]], ids=str)
def test_gate_of_the_first_token(cu, dtype, function):
    """Without an initial state there is nothing to decay: its gradient is 0, not almost."""
    tensors = {name: t.to(dtype) for name, t in make(1, 130, 1, 2, 32, 32, state=False).items()}
    if cu:
        tensors["cu_seqlens"] = torch.tensor(cu)
    dg = run(function, tensors, FINAL, *upstream(tensors, 3 if cu else None))["dg"]
    first = cu[:-1] if cu else [0]
    assert not dg[:, first].any() and dg.count_nonzero() == (130 - len(first)) * 2


def test_gate_equal_over_channels():
    """A decay per channel that is the same in all of them is the decay of the head."""
    tensors = make(1, 70, 1, 2, 16, 24)
    do, dht = upstream(tensors)
    plain = run(recurrent, tensors, FINAL, do, dht)
    for channel, d, n in (("gk", "dgk", 16), ("gv", "dgv", 24)):
        spread = dict(tensors, **{channel: tensors["g"][..., None].expand(1, 70, 2, n)})
        del spread["g"]
        found = run(recurrent, spread, FINAL, do, dht)
        found["dg"] = found.pop(d).double().sum(-1)
        for name, t in plain.items():
            reference.check(name, t, found[name], reference.BOUNDS[f32] * (3 if name in ("dg", "dbeta") else 1))


@both
def test_scaling(function):
    """A factor of scale is one of o and leaves the state; a factor of v and the initial state is one of both."""
    tensors = make(1, 70, 1, 2, 16, 24)
    plain = run(function, tensors, dict(FINAL, scale=0.25))
    four = run(function, tensors, dict(FINAL, scale=1.0))
    assert torch.equal(four["ht"], plain["ht"]) and torch.equal(four["o"], 4 * plain["o"])
    larger = dict(tensors, v=8 * tensors["v"], initial_state=8 * tensors["initial_state"])
    eight = run(function, larger, dict(FINAL, scale=0.25))
    assert torch.equal(eight["ht"], 8 * plain["ht"]) and torch.equal(eight["o"], 8 * plain["o"])
