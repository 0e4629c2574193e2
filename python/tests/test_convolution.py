"""The short convolution against PyTorch's conv1d in float64, sequence by sequence."""

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

from gdn import convolution, library
from gdn.convolution import causal_conv1d, causal_conv1d_fn, causal_conv1d_update

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ERROR = {torch.float32: 3e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float64: 1e-13}


def close(got, want, dtype=None):
    error = (got.double() - want.double()).abs().max().item() if want.numel() else 0
    assert got.shape == want.shape and error <= ERROR[dtype or got.dtype] * max(want.abs().max().item() if want.numel() else 0, 1), error


def reference(x, weight, bias=None, residual=None, initial_state=None, activation=None, cu=None, dilation=1, state_len=None):
    """y and the final states, in float64."""
    B, T, D = x.shape
    x, weight = x.double(), weight.double().reshape(D, 1, -1)
    reach = (weight.shape[-1] - 1) * dilation
    S = initial_state.shape[-1] if initial_state is not None else state_len or max(weight.shape[-1], reach)
    pieces = [(b, 0, T) for b in range(B)] if cu is None else [(0, begin, end) for begin, end in zip(cu, cu[1:])]
    states = []
    y = torch.zeros_like(x) + 0 * sum(t.sum() for t in (weight, bias, residual, initial_state) if t is not None)  # in the graph in any case
    for n, (b, begin, end) in enumerate(pieces):
        before = x.new_zeros(D, S) if initial_state is None else initial_state[n].double()
        row = torch.cat([before, x[b, begin:end].t()], 1)
        states.append(row[:, row.shape[1] - S:])
        if end > begin:
            z = F.conv1d(row[None, :, S - reach:], weight, None if bias is None else bias.double(), groups=D, dilation=dilation)[0]
            z = F.silu(z) if activation else z
            y = y.index_put((torch.tensor(b), torch.arange(begin, end)), z.t())
    if residual is not None:
        covered = torch.zeros(T, dtype=torch.bool)
        covered[:T if cu is None else cu[-1]] = True
        y = y + residual.double() * covered[:, None]
    return y, torch.stack(states) if states else x.new_zeros(0, D, S) + 0 * x.sum()


def arguments(B=2, T=33, D=20, W=4, dtype=torch.float32, N=None, S=None, bias=True, residual=True, state=True):
    made = dict(x=torch.randn(B, T, D).to(dtype), weight=torch.randn(D, W))
    if bias:
        made.update(bias=torch.randn(D))
    if residual:
        made.update(residual=torch.randn(B, T, D).to(dtype))
    if state:
        made.update(initial_state=torch.randn(B if N is None else N, D, S or W))
    return made


def check(inputs, **options):
    cu = options.pop("cu", None)
    inputs = {n: t.requires_grad_() for n, t in inputs.items()}
    wide = {n: t.detach().double().requires_grad_() for n, t in inputs.items()}
    y, state = causal_conv1d(**inputs, cu_seqlens=None if cu is None else torch.tensor(cu), output_final_state=True, **options)
    want, want_state = reference(**wide, cu=cu, **options)
    close(y, want)
    close(state, want_state, inputs["x"].dtype)
    assert state.dtype == y.dtype == inputs["x"].dtype
    dy, ds = torch.randn_like(y), torch.randn_like(state)
    got = torch.autograd.grad([y, state], list(inputs.values()), [dy, ds])
    expected = torch.autograd.grad([want, want_state], list(wide.values()), [dy.double(), ds.double()])
    for name, a, b in zip(inputs, got, expected):
        assert a.dtype == inputs[name].dtype, name
        close(a, b)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("activation", [None, "silu", "swish"])
def test_against_conv1d(dtype, activation):
    check(arguments(dtype=dtype), activation=activation)
    check(arguments(dtype=dtype, residual=False, bias=False, state=False), activation=activation)


@pytest.mark.parametrize("W", [1, 2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("dilation", [1, 3])
def test_widths_and_dilations(W, dilation):
    check(arguments(W=W, S=max((W - 1) * dilation, 1) + W % 3), activation="silu", dilation=dilation)
    check(arguments(W=W, state=False, T=5), activation="silu", dilation=dilation)


@pytest.mark.parametrize("B, T, D", [(0, 5, 3), (1, 0, 3), (1, 1, 1), (2, 2, 129), (1, 129, 151), (3, 151, 7), (1, 1134, 3)])
def test_shapes(B, T, D):
    check(arguments(B, T, D), activation="silu")


@pytest.mark.parametrize("cu", [[0, 33], [0, 1, 1, 3, 20, 33], [0, 0, 31], [0, 16, 32, 33], [0, 0, 0], [0]])
def test_packed(cu):
    check(arguments(B=1, N=len(cu) - 1), activation="silu", cu=cu)
    check(arguments(B=1, state=False), activation="silu", cu=cu)


def test_packed_is_each_alone_to_the_bit():
    cu = [0, 3, 9, 9, 30]
    x, weight, state = torch.randn(1, 33, 40), torch.randn(40, 4), torch.randn(4, 40, 3)
    y, final = causal_conv1d(x, weight, initial_state=state, output_final_state=True, activation="silu", cu_seqlens=torch.tensor(cu))
    for n, (begin, end) in enumerate(zip(cu, cu[1:])):
        alone = causal_conv1d(x[:, begin:end], weight, initial_state=state[n:n + 1], output_final_state=True, activation="silu")
        assert torch.equal(y[:, begin:end], alone[0]) and torch.equal(final[n:n + 1], alone[1])
    assert (y[:, 30:] == 0).all()


def test_nan_behind_the_last_sequence_stays_there():
    x, weight = torch.randn(1, 12, 6).requires_grad_(), torch.randn(6, 4).requires_grad_()
    with torch.no_grad():
        x[:, 8:] = float("nan")
    y, state = causal_conv1d(x, weight, activation="silu", cu_seqlens=torch.tensor([0, 5, 8]), output_final_state=True)
    dy = torch.ones_like(y)
    dy[:, 8:] = float("nan")
    dx, dw = torch.autograd.grad([y, state], [x, weight], [dy, torch.ones_like(state)])
    for t in (y, state, dx, dw):
        assert torch.isfinite(t).all()
    assert (y[:, 8:] == 0).all() and (dx[:, 8:] == 0).all()


@pytest.mark.parametrize("split", [1, 2, 3, 20, 32])
def test_a_state_continues_a_sequence(split):
    x, weight, bias = torch.randn(2, 33, 20), torch.randn(20, 4), torch.randn(20)
    whole, final = causal_conv1d(x, weight, bias, activation="silu", output_final_state=True)
    head, state = causal_conv1d(x[:, :split], weight, bias, activation="silu", output_final_state=True)
    tail, last = causal_conv1d(x[:, split:], weight, bias, initial_state=state, activation="silu", output_final_state=True)
    assert torch.equal(torch.cat([head, tail], 1), whole) and torch.equal(last, final)


@pytest.mark.parametrize("lengths", [[33, 31], [32, 1, 31], [4, 60], [61, 3]])
@pytest.mark.parametrize("packed", [False, True])
def test_halo(lengths, packed):
    """Shards of a sequence: the halo is the end of the shard before, and its gradient goes back there."""
    T, W, D = sum(lengths), 4, 8
    cu = [0, 2, 34, T] if packed else [0, T]
    x, weight = torch.randn(1, T, D).double().requires_grad_(), torch.randn(D, W).double().requires_grad_()
    want, _ = causal_conv1d(x, weight, activation="silu", cu_seqlens=torch.tensor(cu))
    pieces, begin = [], 0
    for n in lengths:
        inside = [c - begin for c in cu if begin < c < begin + n]
        start = max(c for c in cu if c <= begin)
        keep = min(W - 1, begin - start)  # what lies before belongs to another document
        halo = torch.cat([x.new_zeros(1, W - 1 - keep, D), x[:, begin - keep:begin]], 1)
        pieces.append(causal_conv1d(x[:, begin:begin + n], weight, activation="silu", halo=halo,
                                    cu_seqlens=torch.tensor([0, *inside, n]) if packed else None)[0])
        begin += n
    got, dy = torch.cat(pieces, 1), torch.randn_like(want)
    close(got, want)
    for a, b in zip(torch.autograd.grad(got, (x, weight), dy), torch.autograd.grad(want, (x, weight), dy)):
        close(a, b)


def test_halo_beside_states_and_of_other_lengths():
    x, weight, state, cu = torch.randn(1, 20, 5), torch.randn(5, 4), torch.randn(3, 5, 6), torch.tensor([0, 8, 8, 20])
    for rows in (1, 3, 9):
        halo = torch.randn(1, rows, 5)
        replaced = state.clone()
        replaced[0] = F.pad(halo[0].t(), (6, 0))[:, -6:]
        got = causal_conv1d(x, weight, initial_state=state, halo=halo, cu_seqlens=cu, output_final_state=True)
        for a, b in zip(got, causal_conv1d(x, weight, initial_state=replaced, cu_seqlens=cu, output_final_state=True)):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", FLOATS)
def test_strides(dtype):
    x = torch.randn(2, 50, 40).to(dtype)
    weight = torch.randn(40, 4)
    want = causal_conv1d(x, weight, activation="silu")[0]
    views = [x.transpose(1, 2).contiguous().transpose(1, 2), torch.randn(2, 50, 90).to(dtype)[..., 5:45].copy_(x),
             torch.randn(2, 50, 80).to(dtype)[..., ::2].copy_(x), x.flip(1).flip(1), torch.randn(50, 2, 40).to(dtype).transpose(0, 1).copy_(x)]
    for view in views:
        assert torch.equal(causal_conv1d(view, weight.t().contiguous().t(), activation="silu")[0], want)
    one = torch.randn(1, 1, 40).to(dtype).expand(2, 50, 40).requires_grad_()
    y, _ = causal_conv1d(one, weight)
    assert torch.equal(torch.autograd.grad(y.sum(), one)[0], torch.autograd.grad(causal_conv1d(one.contiguous(), weight)[0].sum(), one)[0])


def test_many_tokens_and_threads():
    import gdn

    x, weight, bias = (t.requires_grad_() for t in (torch.randn(2, 3000, 70), torch.randn(70, 4), torch.randn(70)))
    dy, threads, results = torch.randn(2, 3000, 70), gdn.get_num_threads(), []
    try:
        for n in (1, 2, 5):
            gdn.set_num_threads(n)
            y, _ = causal_conv1d(x, weight, bias, activation="silu")
            results.append([y, *torch.autograd.grad(y, (x, weight, bias), dy)])
    finally:
        gdn.set_num_threads(threads)
    for other in results[1:]:
        for a, b in zip(results[0], other):
            assert torch.equal(a, b)


def test_gradcheck():
    x = arguments(1, 7, 2, 3, torch.float64, N=3, S=3)
    inputs = {n: t.double().requires_grad_() for n, t in x.items()}
    cu = torch.tensor([0, 2, 2, 6])
    assert torch.autograd.gradcheck(lambda *t: causal_conv1d(**dict(zip(inputs, t)), activation="silu", output_final_state=True, cu_seqlens=cu),
                                    list(inputs.values()))


def test_opcheck():
    x = {n: t.requires_grad_() for n, t in arguments(1, 9, 4, N=2).items()}
    cu = torch.tensor([0, 4, 8])
    given = (x["x"], x["weight"], x["bias"], x["residual"], x["initial_state"], cu)
    opcheck(library.operator("conv_fwd"), (*given, True, 1, 4, True))
    opcheck(library.operator("conv_fwd"), (x["x"], x["weight"], None, None, None, None, False, 2, 0, False))
    plain = [t.detach() for t in given]
    opcheck(library.operator("conv_bwd"), (*plain, torch.randn(1, 9, 4), torch.randn(2, 4, 4), True, 1, 4))


@pytest.mark.slow
def test_compile():
    f = torch.compile(lambda x, w: causal_conv1d(x, w, activation="silu", output_final_state=True), fullgraph=True)
    for T in (20, 33, 70):
        x, w = torch.randn(2, T, 6).requires_grad_(), torch.randn(6, 4).requires_grad_()
        got, want = f(x, w), causal_conv1d(x, w, activation="silu", output_final_state=True)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
        assert torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y, _ in (got, want)))


# ---------------------------------------------------------------- the package's functions
def test_fn_has_the_packages_layout():
    x, weight, bias, state = torch.randn(2, 20, 33), torch.randn(20, 4), torch.randn(20), torch.randn(2, 20, 3)
    y, final = causal_conv1d_fn(x, weight, bias, initial_states=state, return_final_states=True, activation="silu")
    want, want_final = reference(x.transpose(1, 2), weight, bias, initial_state=state, activation="silu")
    close(y, want.transpose(1, 2))
    close(final, want_final)
    out = torch.empty(2, 20, 3)
    assert causal_conv1d_fn(x, weight, return_final_states=True, final_states_out=out)[1] is out and torch.equal(out, x[..., -3:])
    assert torch.equal(causal_conv1d_fn(x, weight), causal_conv1d(x.transpose(1, 2), weight)[0].transpose(1, 2))


def test_fn_with_sequence_numbers():
    x, weight = torch.randn(2, 6, 10), torch.randn(6, 3)
    seq_idx = torch.tensor([[0, 0, 0, 1, 1, 1, 1, -1, -1, 2], [5, 5, 5, 5, 5, 5, 5, 5, 5, 5]], dtype=torch.int32)
    y = causal_conv1d_fn(x, weight, seq_idx=seq_idx, activation="silu")
    for b, begin, end in ((0, 0, 3), (0, 3, 7), (0, 9, 10), (1, 0, 10)):
        assert torch.equal(y[b:b + 1, :, begin:end], causal_conv1d_fn(x[b:b + 1, :, begin:end], weight, activation="silu"))
    assert (y[0, :, 7:9] == 0).all()


@pytest.mark.parametrize("S", [3, 4, 7])
@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("dtype", FLOATS)
def test_update(S, steps, dtype):
    x, weight, bias, state = torch.randn(3, 10, 20).to(dtype), torch.randn(10, 4), torch.randn(10), torch.randn(3, 10, S).to(dtype)
    want = causal_conv1d_fn(x, weight, bias, initial_states=state[..., -3:], activation="silu")
    row = torch.cat([state, x], -1)
    for t in range(0, 20, steps):
        y = causal_conv1d_update(x[..., t] if steps == 1 else x[..., t:t + steps], state, weight, bias, "silu")
        assert torch.equal(y, want[..., t] if steps == 1 else want[..., t:t + steps])
    assert torch.equal(state, row[..., -S:])


@pytest.mark.parametrize("S", [3, 5, 8])
def test_circular_update(S):
    x, weight, state = torch.randn(2, 4, 12), torch.randn(4, 4), torch.zeros(2, 4, S)
    want = causal_conv1d_fn(x, weight)
    for t in range(12):
        y = causal_conv1d_update(x[..., t], state, weight, cache_seqlens=torch.tensor([t, t], dtype=torch.int32))
        close(y, want[..., t])
    for i in range(12 - S, 12):
        assert torch.equal(state[..., i % S], x[..., i])


def test_update_of_chosen_rows():
    pool = torch.randn(6, 4, 3)
    was, x, weight = pool.clone(), torch.randn(3, 4), torch.randn(4, 4)
    y = causal_conv1d_update(x, pool, weight, activation="silu", conv_state_indices=torch.tensor([4, -1, 1], dtype=torch.int32))
    states = was[[4, 1]].clone()
    assert torch.equal(y[[0, 2]], causal_conv1d_update(x[[0, 2]], states, weight, activation="silu")) and (y[1] == 0).all()
    assert torch.equal(pool[[4, 1]], states) and torch.equal(pool[[0, 2, 3, 5]], was[[0, 2, 3, 5]])


def test_module():
    module = convolution.ShortConvolution(12, 4, bias=True)
    plain = torch.nn.Conv1d(12, 12, 4, groups=12, padding=3)
    plain.load_state_dict(module.state_dict())
    x = torch.randn(2, 15, 12)
    y, state = module(x, output_final_state=True)
    close(y, F.silu(plain(x.transpose(1, 2))[..., :15]).transpose(1, 2))
    head, cache = module(x[:, :9], output_final_state=True)
    with torch.no_grad():
        steps = [module(x[:, t:t + 1], cache=cache, output_final_state=True)[0] for t in range(9, 15)]
    close(torch.cat([head, *steps], 1), y)
    assert torch.equal(cache, state)
    mask = torch.ones(2, 15)
    mask[0, :4] = 0
    masked, _ = module(x, mask=mask)
    assert torch.equal(masked[0, 4:], module(x[:1, 4:])[0][0])
    assert torch.autograd.grad(y.sum(), [module.weight])[0].shape == (12, 1, 4)


@pytest.mark.parametrize("call, kind, words", [
    (lambda x, w: causal_conv1d(x), ValueError, "weight is None"),
    (lambda x, w: causal_conv1d(x, w, activation="relu"), ValueError, "activation is 'relu'"),
    (lambda x, w: causal_conv1d(x, w[:3]), ValueError, "weight has shape"),
    (lambda x, w: causal_conv1d(x[0], w), ValueError, "x has rank 2"),
    (lambda x, w: causal_conv1d(x.int(), w), ValueError, "x has dtype int32"),
    (lambda x, w: causal_conv1d(x, torch.ones(4, 17)), ValueError, "W=17"),
    (lambda x, w: causal_conv1d(x, torch.ones(4, 0)), ValueError, "W=0"),
    (lambda x, w: causal_conv1d(x, w, dilation=0), ValueError, "dilation is 0"),
    (lambda x, w: causal_conv1d(x, w, dilation=5000), ValueError, "dilation is 5000"),
    (lambda x, w: causal_conv1d(x, w, torch.ones(5)), ValueError, "bias has shape"),
    (lambda x, w: causal_conv1d(x, w, residual=torch.ones(2, 9, 5)), ValueError, "residual has shape"),
    (lambda x, w: causal_conv1d(x, w, initial_state=torch.ones(2, 4, 2)), ValueError, "state_len is 2"),
    (lambda x, w: causal_conv1d(x, w, initial_state=torch.ones(3, 4, 3)), ValueError, "initial_state has shape"),
    (lambda x, w: causal_conv1d(x, w, cu_seqlens=torch.tensor([0, 9])), ValueError, "B=2"),
    (lambda x, w: causal_conv1d(x[:1], w, cu_seqlens=torch.tensor([0, 5, 4])), ValueError, "do not decrease"),
    (lambda x, w: causal_conv1d(x, w, halo=torch.ones(2, 3, 5)), ValueError, "halo has shape"),
    (lambda x, w: causal_conv1d(x, w, halo=torch.ones(2, 3, 4), initial_state=torch.ones(2, 4, 3)), ValueError, "both given"),
    (lambda x, w: causal_conv1d(x, w, cp_context=object()), ValueError, "cp_context is object"),
    (lambda x, w: causal_conv1d(x, w, backend="mps"), ValueError, "backend is 'mps'"),
    (lambda x, w: causal_conv1d(x, w, unknown=1), TypeError, "unknown"),
    (lambda x, w: causal_conv1d_fn(x, w, seq_idx=torch.zeros(2, 4), initial_states=torch.ones(1)), ValueError, "seq_idx is given with states"),
    (lambda x, w: causal_conv1d_update(x, torch.ones(2, 4, 2), w), ValueError, "conv_state has shape"),
    (lambda x, w: causal_conv1d_update(x, torch.ones(2, 4, 3), w.requires_grad_()), RuntimeError, "for inference"),
    (lambda x, w: convolution.ShortConvolution(4, 3, activation="gelu"), ValueError, "activation is 'gelu'"),
])
def test_what_is_refused(call, kind, words):
    with pytest.raises(kind, match=words):
        call(torch.randn(2, 9, 4), torch.randn(4, 4))
