"""Frame GDN: the operators against a plain recurrence, and the scan over ranks against one process, on simulated ranks and on gloo."""

import os
import subprocess
import sys

import pytest
import torch
from torch.library import opcheck

import gdn
from gdn import frame, library

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from ranks import simulate  # noqa: E402


@pytest.fixture(autouse=True)
def _one_thread():
    """Tensors here are small, and many ranks share the process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


NAMES = ("W", "U", "Wz", "uz", "initial_state", "initial_z")


def recurrence(W, U, Wz=None, uz=None, initial_state=None, initial_z=None, active=None, reverse=False, exclusive=False):
    """(S, z, final_state, final_z) frame by frame, differentiable by PyTorch."""
    BH, T = W.shape[:2]
    S = U.new_zeros(BH, *U.shape[2:]) if initial_state is None else initial_state
    z = None if Wz is None else uz.new_zeros(BH, uz.shape[2]) if initial_z is None else initial_z
    states, zs = [None] * T, [None] * T
    for t in reversed(range(T)) if reverse else range(T):
        before = S, z
        if active is None or t < active:
            S = S @ W[:, t] + U[:, t]
            z = None if z is None else torch.einsum("bij,bj->bi", Wz[:, t], z) + uz[:, t]
        states[t], zs[t] = before if exclusive else (S, z)
    stack = lambda x, like: torch.stack(x, 1) if x else like[:, :0]  # noqa: E731
    return stack(states, U), None if z is None else stack(zs, uz), S, z


def problem(BH=2, T=5, K=6, V=4, dtype=torch.float64, two=True, initial=True, grad=True):
    """Arguments of a scan; the transitions are general, not symmetric."""
    x = {"W": torch.randn(BH, T, K, K) * K ** -0.5, "U": torch.randn(BH, T, V, K)}
    if two:
        x.update(Wz=torch.randn(BH, T, K, K) * K ** -0.5, uz=torch.randn(BH, T, K))
    if initial:
        x.update(initial_state=torch.randn(BH, V, K))
        if two:
            x.update(initial_z=torch.randn(BH, K))
    return {name: t.to(dtype).requires_grad_(grad) for name, t in x.items()}


def weights(outputs):
    """An upstream gradient for every output."""
    return [None if o is None else torch.randn_like(o) for o in outputs]


def total(outputs, upstream, leaves=()):
    """The loss; it depends on the leaves, if only by name."""
    return sum(0 * t.sum() for t in leaves) + sum((o * u).sum() for o, u in zip(outputs, upstream) if o is not None and u is not None)


def close(got, want, bound, name=""):
    assert (got is None) == (want is None), name
    if got is not None:
        assert got.shape == want.shape and got.isfinite().all(), name
        error = (got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30) if want.numel() else 0
        assert error <= bound, f"{name}: {error:.1e}"


# Of 16-bit results: one rounding errs by at most 2^-8 or 2^-11.
BOUND = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2 ** -8, torch.float16: 2 ** -11}
directions = pytest.mark.parametrize("reverse,exclusive", [(False, False), (True, False), (False, True), (True, True)])


# ---------------------------------------------------------------- one process


@directions
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_scan_is_the_recurrence(dtype, reverse, exclusive):
    for sizes in (dict(), dict(BH=3, T=1, K=1, V=1), dict(T=4, K=33, V=48), dict(BH=1, T=3, K=112, V=112)):
        for two in (True, False):
            for initial in (True, False):
                for active in (None, 0, 1, 3) if sizes.get("K", 0) < 100 else (None,):
                    x = problem(**sizes, two=two, initial=initial, dtype=dtype)
                    T = x["W"].shape[1]
                    options = dict(active=None if active is None else min(active, T), reverse=reverse, exclusive=exclusive)
                    got = frame.scan(**x, **options, output_final_state=True)
                    exact = {n: t.detach().double().requires_grad_() for n, t in x.items()}
                    want = recurrence(**exact, **options)
                    upstream = weights(got)
                    state = torch.float64 if dtype == torch.float64 else torch.float32
                    assert got.S.dtype == dtype and got.final_state.dtype == state
                    for name, a, b in zip(got._fields, got, want):
                        close(a, b, BOUND[dtype if name in "Sz" else state], name)
                    grads = torch.autograd.grad(total(got, upstream), list(x.values()))
                    wanted = torch.autograd.grad(total(want, upstream, exact.values()), list(exact.values()))
                    for (name, t), a, b in zip(x.items(), grads, wanted):
                        assert a.dtype == t.dtype
                        close(a, b, BOUND[dtype], "d" + name)


@directions
def test_gradcheck_of_the_scan(reverse, exclusive):
    for two, initial in ((True, True), (False, False)):
        x = problem(BH=1, T=4, K=3, V=2, two=two, initial=initial)
        assert torch.autograd.gradcheck(
            lambda *t: tuple(o for o in frame.scan(**dict(zip(x, t)), active=3, reverse=reverse, exclusive=exclusive, output_final_state=True)
                             if o is not None), list(x.values()))


def test_gradcheck_of_composites_and_merge():
    for two in (True, False):
        x = problem(BH=1, T=3, K=3, V=2, two=two, initial=False)
        assert torch.autograd.gradcheck(lambda *t: tuple(o for o in frame.summarize(**dict(zip(x, t)), active=2, reverse=True) if o is not None),
                                        list(x.values()))
        parts = [torch.randn(3, 1, *s, dtype=torch.float64, requires_grad=True) for s in ((2, 3), (3, 3), (3,), (3, 3))[:4 if two else 2]]
        start = [torch.randn(1, *s, dtype=torch.float64, requires_grad=True) for s in ((2, 3), (3,))[:2 if two else 1]]
        for reverse in (False, True):

            def merged(*t):
                summary = frame.Summary(*t[:len(parts)], *([None] * (4 - len(parts))))
                return tuple(o for o in frame.merge(summary, *t[len(parts):], reverse=reverse) if o is not None)

            assert torch.autograd.gradcheck(merged, parts + start)


def tokens(B=1, T=2, R=3, H=2, K=3, V=2, dtype=torch.float64, frames=False):
    x = dict(k=torch.randn(B, T * R, H, K), v=torch.randn(B, T * R, H, V), beta=torch.rand(B, T if frames else T * R, H),
             decay=torch.rand(B, T, H), kz=torch.randn(B, T * R, H, K))
    return {n: t.to(dtype).requires_grad_() for n, t in x.items()}


def test_gradcheck_of_transitions_and_projection():
    for frames in (True, False):
        x = tokens(frames=frames)
        assert torch.autograd.gradcheck(lambda *t: frame.build_transitions(**dict(zip(x, t))), list(x.values()))
    x.pop("kz")
    assert torch.autograd.gradcheck(lambda *t: frame.build_transitions(**dict(zip(x, t)))[:2], list(x.values()))
    q, qz = (torch.randn(1, 6, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    S, z = (torch.randn(2, 2, *s, dtype=torch.float64, requires_grad=True) for s in ((4, 3), (3,)))
    assert torch.autograd.gradcheck(frame.project, (q, S, qz, z))
    assert torch.autograd.gradcheck(lambda q, S: frame.project(q, S)[0], (q, S))


def built(k, v, beta, decay, kz=None):
    """The transitions by einsum, from tokens [B, T, R, H, ...]."""
    def transition(k):
        P = torch.einsum("btrh,btrhi,btrhj->bhtij", beta, k, k)
        return decay.transpose(1, 2)[..., None, None] * (torch.eye(k.shape[-1], dtype=k.dtype) - P)

    made = [transition(k), torch.einsum("btrh,btrhi,btrhj->bhtij", beta, v, k)]
    made += [] if kz is None else [transition(kz), torch.einsum("btrh,btrhj->bhtj", beta, kz)]
    return [m.flatten(0, 1) for m in made]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_transitions_and_projection(dtype):
    for sizes in (dict(), dict(B=2, T=3, R=5, H=3, K=17, V=9), dict(T=2, R=150, H=1, K=40, V=24)):
        x = tokens(**sizes, dtype=dtype)
        x["k"] = (x["k"] * 0.2).detach().requires_grad_()
        x["decay"].data[0, 0] = 0
        W, U, Wz, uz = made = frame.build_transitions(**x)
        T = x["decay"].shape[1]
        exact = {n: t.detach().double().requires_grad_() for n, t in x.items()}
        want = built(**{n: t if n == "decay" else t.unflatten(1, (T, -1)) for n, t in exact.items()})
        bound = 1e-12 if dtype == torch.float64 else 1e-5
        for name, a, b in zip(("W", "U", "Wz", "uz"), made, want):
            assert a.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            close(a, b, bound, name)
        assert torch.equal(W, W.transpose(-1, -2)) and torch.equal(Wz, Wz.transpose(-1, -2))
        upstream = weights(made)
        grads = torch.autograd.grad(total(made, upstream), list(x.values()))
        for (name, _), a, b in zip(x.items(), grads, torch.autograd.grad(total(want, upstream), list(exact.values()))):
            close(a, b, max(BOUND[dtype], 3e-5 if dtype != torch.float64 else 0), "d" + name)

        H = x["k"].shape[2]
        q, qz = (torch.randn_like(x["k"]).requires_grad_() for _ in range(2))
        S, z = U.detach().requires_grad_(), uz.detach().requires_grad_()
        num, den = frame.project(q, S, qz, z)
        q5, qz5 = (t.detach().double().requires_grad_() for t in (q, qz))
        S5, z5 = (t.detach().double().requires_grad_() for t in (S, z))
        wanted = (torch.einsum("btrhk,bhtvk->btrhv", q5.unflatten(1, (T, -1)), S5.unflatten(0, (-1, H))).flatten(1, 2),
                  torch.einsum("btrhk,bhtk->btrh", qz5.unflatten(1, (T, -1)), z5.unflatten(0, (-1, H))).flatten(1, 2))
        assert num.dtype == dtype
        close(num, wanted[0], BOUND[dtype], "num")
        close(den, wanted[1], bound, "den")
        upstream = weights((num, den))
        grads = torch.autograd.grad(total((num, den), upstream), (q, S, qz, z))
        for name, a, b in zip(("q", "S", "qz", "z"), grads, torch.autograd.grad(total(wanted, upstream), (q5, S5, qz5, z5))):
            close(a, b, max(BOUND[dtype] if name in ("q", "qz") else bound, 1e-12), "d" + name)


def test_tokens_of_any_layout():
    x = tokens(B=2, T=3, R=4, H=2, K=5, V=5, dtype=torch.float32)
    want = frame.build_transitions(**x)
    turned = {n: t.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) if n in ("k", "v", "kz") else t for n, t in x.items()}  # (B, H, D, N) in memory
    for a, b in zip(frame.build_transitions(**turned), want):
        assert torch.equal(a, b)
    W, U, Wz, uz = (t.detach() for t in want)
    strided = [torch.stack([t, t], -1)[..., 0] for t in (W, U, Wz, uz)] + [None, None]
    flipped = [W.transpose(-1, -2), U.flip(1).flip(1), Wz.transpose(-1, -2), uz]
    for a, b, c in zip(frame.scan(*strided), frame.scan(W, U, Wz, uz), frame.scan(*flipped)):
        assert a is b is None or torch.equal(a, b) and torch.equal(c, b)


@directions
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_padding_is_not_read(dtype, reverse, exclusive):
    for fill in (float("nan"), float("inf")):
        x = problem(T=5, dtype=dtype)
        dirty = {n: t.detach().clone() for n, t in x.items()}
        for name in NAMES[:4]:
            dirty[name][:, 3:] = fill
            dirty[name].requires_grad_()
        options = dict(active=3, reverse=reverse, exclusive=exclusive, output_final_state=True)
        got, want = frame.scan(**dirty, **options), frame.scan(**x, **options)
        upstream = weights(got)
        leaves = [dirty[n] for n in NAMES[:4]]
        grads = torch.autograd.grad(total(got, upstream), leaves)
        for a, b in zip((*got, *grads), (*want, *torch.autograd.grad(total(want, upstream), [x[n] for n in NAMES[:4]]))):
            assert torch.equal(a, b)
        assert all((g[:, 3:] == 0).all() for g in grads)
        for a, b in zip(frame.summarize(*leaves, active=3, reverse=reverse), frame.summarize(*(x[n] for n in NAMES[:4]), active=3, reverse=reverse)):
            assert torch.equal(a, b)


def test_a_state_of_zero_is_not_multiplied():
    """What is not finite in the first W must not show without a state before it."""
    x = problem(T=3, initial=False, grad=False)
    x["W"][:, 0], x["Wz"][:, 0] = float("inf"), float("nan")
    got = frame.scan(**x, output_final_state=True)
    x["W"][:, 0], x["Wz"][:, 0] = 0, 0
    for a, b in zip(got, frame.scan(**x, output_final_state=True)):
        assert torch.equal(a, b)


def test_merge_of_overflowed_products():
    h = torch.zeros(3, 1, 2, 2)
    h[1:] = torch.randn(2, 1, 2, 2)
    M = torch.full((3, 1, 2, 2), float("inf"))
    M[2] = torch.eye(2)
    S, z = frame.merge(frame.Summary(h, M, None, None))
    assert z is None and torch.equal(S, torch.stack([h[0], h[1], h[1] + h[2]]))


def test_resets_forget():
    x = tokens(T=4, R=2, dtype=torch.float32)
    x["decay"].data[:, 2] = 0
    W, U, Wz, uz = frame.build_transitions(**x)
    whole, rest = frame.scan(W, U, Wz, uz), frame.scan(W[:, 2:], U[:, 2:], Wz[:, 2:], uz[:, 2:])
    assert torch.equal(whole.S[:, 2:], rest.S) and torch.equal(whole.z[:, 2:], rest.z)


def test_reverse_exclusive_is_flip_and_shift():
    """A bidirectional layer: the second direction by a neutral first frame and flips, and in one scan."""
    W, U, Wz, uz = problem(T=6, initial=False, grad=False).values()
    eye = torch.eye(W.shape[-1], dtype=W.dtype).expand(W.shape[0], 1, -1, -1)
    flipped = [torch.cat([first, t.flip(1)[:, :-1]], 1) for first, t in ((eye, W), (torch.zeros_like(U[:, :1]), U), (eye, Wz), (torch.zeros_like(uz[:, :1]), uz))]
    want = frame.scan(*flipped)
    got = frame.scan(W, U, Wz, uz, reverse=True, exclusive=True)
    close(got.S, want.S.flip(1), 1e-14)
    close(got.z, want.z.flip(1), 1e-14)


def test_streaming_in_chunks():
    x = problem(T=9, initial=False, grad=False, dtype=torch.float32)
    whole = frame.scan(**x, output_final_state=True)
    state = z = None
    for chunk in (slice(0, 3), slice(3, 4), slice(4, 4), slice(4, 9)):
        S, zs, state, z = frame.scan(**{n: t[:, chunk] for n, t in x.items()}, initial_state=state, initial_z=z, output_final_state=True)
        assert torch.equal(S, whole.S[:, chunk]) and torch.equal(zs, whole.z[:, chunk])
    assert torch.equal(state, whole.final_state) and torch.equal(z, whole.final_z)


def test_composite_stands_for_its_frames():
    x = problem(T=7)
    parts = [slice(0, 2), slice(2, 6), slice(6, 7)]
    for reverse in (False, True):
        all_parts = [frame.summarize(*(x[n][:, p] for n in NAMES[:4]), reverse=reverse) for p in parts]
        S, z = frame.merge(frame.Summary(*(torch.stack(t) for t in zip(*all_parts))), x["initial_state"], x["initial_z"], reverse=reverse)
        want = recurrence(**x, reverse=reverse)
        for i, p in enumerate(parts):
            edge = p.start if reverse else p.stop - 1
            close(S[i], want[0][:, edge], 1e-12)
            close(z[i], want[1][:, edge], 1e-12)


def test_bits_do_not_depend_on_threads():
    x = problem(BH=3, T=4, K=40, V=37, dtype=torch.float32)
    t = tokens(B=1, T=3, R=140, H=2, K=20, V=20, dtype=torch.float32)

    def everything():
        got = frame.scan(**x, output_final_state=True)
        made = frame.build_transitions(**t)
        torch.manual_seed(1)
        return [*got, *frame.summarize(*(x[n] for n in NAMES[:4])), *torch.autograd.grad(total(got, weights(got)), list(x.values())), *made,
                *torch.autograd.grad(total(made, weights(made)), list(t.values()))]

    before = gdn.get_num_threads()
    try:
        results = []
        for n in (1, 2, 5):
            gdn.set_num_threads(n)
            results.append(everything())
    finally:
        gdn.set_num_threads(before)
    for other in results[1:]:
        for a, b in zip(results[0], other):
            assert torch.equal(a, b)


@pytest.mark.parametrize("change,words", [
    (dict(U=torch.zeros(2, 5, 4, 7)), "U has shape"),
    (dict(uz=None), "Wz is given without uz"),
    (dict(Wz=None), "uz is given without Wz"),
    (dict(W=torch.zeros(2, 5, 6)), "W has rank 3"),
    (dict(W=torch.zeros(2, 5, 6, 6, dtype=torch.int32)), "W has dtype int32"),
    (dict(U=torch.zeros(2, 5, 4, 6, dtype=torch.float64)), "U has dtype"),
    (dict(initial_state=torch.zeros(3, 4, 6)), "initial_state has shape"),
    (dict(active=6), "active is 6, expected 0 to T=5"),
    (dict(active=-1), "active is -1"),
])
def test_bad_arguments_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        frame.scan(**{**problem(dtype=torch.float32), **change})


def test_bad_tokens_are_refused():
    x = tokens()
    for change, words in ((dict(beta=x["beta"][:, :5]), "beta has shape"), (dict(k=x["k"][:, :5], beta=x["beta"][:, :5]), "k has shape"),
                          (dict(decay=x["decay"][..., 0]), "decay"), (dict(v=x["v"][:, :, :1]), "v has shape")):
        with pytest.raises(ValueError, match=words):
            frame.build_transitions(**{**x, **change})
    with pytest.raises(ValueError, match="given without"):
        frame.project(x["k"], torch.zeros(2, 2, 2, 3, dtype=torch.float64), x["kz"])
    with pytest.raises(ValueError, match="S .*expected"):
        frame.project(x["k"], torch.zeros(3, 2, 2, 3, dtype=torch.float64))


def test_operators_pass_opcheck():
    x = problem(dtype=torch.float32)
    W, U, Wz, uz, S0, z0 = x.values()
    plain = [t.detach() for t in x.values()]
    for two in (True, False):
        a = [W, U, Wz, uz, S0, z0] if two else [W, U, None, None, S0, None]
        opcheck(library.operator("frame_fwd"), (*a, 1, False, True, True, two))
        opcheck(library.operator("frame_summary_fwd"), (*a[:4], 1, True, True, two))
    S, z = frame.scan(*plain)[:2]
    opcheck(library.operator("frame_bwd"), (plain[0], S, None, plain[4], plain[2], z, None, plain[5], S, z, None, None, 1, False, False))
    opcheck(library.operator("frame_pullback"), (plain[0], S, plain[2], z, 1, False, False))
    h, M, hz, Mz = (t.detach().unsqueeze(0).requires_grad_() for t in frame.summarize(*plain[:4]))
    opcheck(library.operator("frame_merge_fwd"), (M, h, Mz, hz, S0, z0, False))
    k = torch.randn(1, 2, 3, 2, 4, requires_grad=True)
    beta, decay = torch.rand(1, 2, 3, 2, requires_grad=True), torch.rand(1, 2, 2, requires_grad=True)
    opcheck(library.operator("frame_build_fwd"), (k, k, beta, decay, k))
    opcheck(library.operator("frame_project_fwd"), (k, torch.randn(1, 2, 2, 5, 4, requires_grad=True), k, torch.randn(1, 2, 2, 4, requires_grad=True)))


def layer(q, k, v, beta, decay, qz, kz):
    """Attention both ways over frames."""
    W, U, Wz, uz = frame.build_transitions(k, v, beta, decay, kz)
    S, z, *_ = frame.scan(W, U, Wz, uz)
    Sr, zr, *_ = frame.scan(W, U, Wz, uz, reverse=True, exclusive=True)
    num, den = frame.project(q, S + Sr, qz, z + zr)
    return num / (den + 1e-6).unsqueeze(-1)


@pytest.mark.slow
def test_compile_fullgraph():
    compiled = torch.compile(layer, fullgraph=True)
    for T in (2, 3, 5):
        x = tokens(T=T, R=4, K=8, V=6, dtype=torch.float32)
        q, qz = torch.rand(2, 1, T * 4, 2, 8).requires_grad_()
        args = [q, x["k"], x["v"], x["beta"], x["decay"], qz, x["kz"]]
        leaves = list(x.values())
        got, want = compiled(*args), layer(*args)
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-6)
        for a, b in zip(torch.autograd.grad(got.sin().sum(), leaves), torch.autograd.grad(want.sin().sum(), leaves)):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def test_double_backward_is_refused():
    x = problem()
    (g,) = torch.autograd.grad(frame.scan(**x).S.sum(), x["W"], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        g.sum().backward()


# ---------------------------------------------------------------- over ranks


def cut(x, lengths, rank):
    """The rank's own frames, as leaves; the initial states are the same on all."""
    start = sum(lengths[:rank])
    return {n: (t if n.startswith("initial") else t[:, start:start + lengths[rank]]).detach().clone().requires_grad_() for n, t in x.items()}


def run_rank(transport, x, lengths, upstream, used, active=None, **options):
    """One rank's results and gradients. upstream: of S and z, over all frames, and by rank of the final states."""
    mine = cut(x, lengths, transport.rank)
    start, length = sum(lengths[:transport.rank]), lengths[transport.rank]
    if active is not None:
        active = min(max(active - start, 0), length)
    got = frame.scan(**mine, group=transport, active=active, **options)
    loss = 0
    for name, o, u in zip(got._fields, got, upstream):
        if o is not None and name in used[transport.rank]:
            loss = loss + (o * (u[transport.rank] if "final" in name else u[:, start:start + length])).sum()
    loss.backward()
    return got, {n: t.grad for n, t in mine.items()}, transport.traffic.collectives


def check_spread(size, lengths, used=None, bound=1e-12, dtype=torch.float64, two=True, initial=True, K=5, V=3, active=None, output_final_state=True,
                 **options):
    x = problem(BH=2, T=sum(lengths), K=K, V=V, two=two, initial=initial, dtype=dtype)
    plain = {n: v for n, v in options.items() if n in ("reverse", "exclusive")}
    exact = {n: t.detach().double().requires_grad_() for n, t in x.items()}
    want = recurrence(**exact, active=active, **plain)
    upstream = [None if o is None else torch.randn(*((size,) if i > 1 else ()), *o.shape, dtype=torch.float64) for i, o in enumerate(want)]
    used = used or [("S", "z", "final_state", "final_z")] * size
    if not output_final_state:
        used = [tuple(n for n in names if "final" not in n) for names in used]
    results, _ = simulate(
        size, lambda transport: run_rank(transport, x, lengths, upstream, used, active, output_final_state=output_final_state, **options))
    loss = total((), (), exact.values())
    for rank in range(size):
        start, stop = sum(lengths[:rank]), sum(lengths[:rank + 1])
        for name, o, u in zip(frame.Scan._fields, want, upstream):
            if o is not None and name in used[rank]:
                loss = loss + ((o * u[rank]) if "final" in name else (o * u)[:, start:stop]).sum()
    loss.backward()
    order = range(size)[::-1] if options.get("reverse") else range(size)
    for rank, (got, grads, collectives) in enumerate(results):
        start, stop = sum(lengths[:rank]), sum(lengths[:rank + 1])
        close(got.S, want[0][:, start:stop], bound, f"S of rank {rank}")
        close(got.z, None if want[1] is None else want[1][:, start:stop], bound, f"z of rank {rank}")
        if output_final_state:
            close(got.final_state, want[2], bound, "final_state")
            close(got.final_z, want[3], bound, "final_z")
            assert torch.equal(got.final_state, results[0][0].final_state)
        else:
            assert got.final_state is None and got.final_z is None
        for name, g in grads.items():
            if name.startswith("initial"):
                close(g, exact[name].grad if rank == order[0] else torch.zeros_like(g), bound * 10, f"d{name} of rank {rank}")
            elif stop > start:
                scale = exact[name].grad.norm() / max(exact[name].grad[:, start:stop].norm(), 1e-30)
                close(g, exact[name].grad[:, start:stop], bound * 10 * max(scale, 1), f"d{name} of rank {rank}")
        if options.get("allgather_impl") is None:
            assert collectives == (2 if size > 1 else 0), "one gather forward, one backward"


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_ranks_agree_with_one_process(size):
    for reverse, exclusive in ((False, False), (True, False), (True, True), (False, True)):
        for final in (True, False):
            for two, initial in ((True, False), (False, True), (True, True)):
                check_spread(size, [2] * size, reverse=reverse, exclusive=exclusive, output_final_state=final, two=two, initial=initial)


def test_ranks_with_uneven_and_no_frames():
    for lengths in ([1, 1], [0, 3], [3, 0], [0, 0, 4], [2, 0, 3, 1], [1, 5, 0, 0]):
        for reverse in (False, True):
            check_spread(len(lengths), lengths, reverse=reverse)
            check_spread(len(lengths), lengths, reverse=reverse, output_final_state=False, initial=False)


def test_ranks_with_padding():
    for active in range(0, 9):
        for reverse in (False, True):
            check_spread(3, [3, 3, 2], active=active, reverse=reverse)


def test_ranks_recompute():
    check_spread(3, [2, 3, 1], recompute=True)
    check_spread(3, [2, 3, 1], recompute=True, reverse=True, exclusive=True, two=False)
    check_spread(2, [2, 2], recompute=True, output_final_state=False)


def test_ranks_by_messages():
    check_spread(3, [2, 2, 2], allgather_impl="p2p")


def test_ranks_in_single_precision():
    for D in (16, 32, 64, 112, 128):
        check_spread(3, [2, 2, 2], dtype=torch.float32, bound=1e-5, K=D, V=D)


def test_ranks_use_different_results():
    """Ranks that leave a result out of their loss hang nobody, and what the others ask comes back."""
    everything = ("S", "z", "final_state", "final_z")
    for used in ([everything, ("S",), ("z",)], [("S",), ("final_state",), ("S",)], [("final_z",), ("S",), everything], [("S",)] * 3):
        for reverse in (False, True):
            check_spread(3, [2, 1, 2], used=used, reverse=reverse)
    check_spread(2, [2, 2], used=[("final_state",), ("z",)])


def test_ranks_with_16_bits():
    for dtype in (torch.bfloat16, torch.float16):
        x = problem(T=6, K=16, V=16, dtype=dtype, initial=False)
        exact = {n: t.detach().double().requires_grad_() for n, t in x.items()}
        want = recurrence(**exact)
        want[0].sum().backward()

        def work(transport):
            mine = cut(x, [2, 2, 2], transport.rank)
            got = frame.scan(**mine, group=transport, output_final_state=True)
            got.S.float().sum().backward()
            return got, mine

        results, _ = simulate(3, work)
        close(torch.cat([r[0].S for r in results], 1), want[0], BOUND[dtype])
        close(results[1][0].final_state, want[2], 1e-5)
        for name in ("W", "U"):
            close(torch.cat([r[1][name].grad for r in results], 1), exact[name].grad, BOUND[dtype])


# As Sana's training code calls it.

def cp_problem(T, dtype=torch.float64, BH=2, D=3):
    eye = torch.eye(D)
    x = [eye + 0.025 * torch.randn(BH, T, D, D), 0.05 * torch.randn(BH, T, D, D), eye + 0.025 * torch.randn(BH, T, D, D), 0.05 * torch.randn(BH, T, D)]
    return [t.to(dtype) for t in x]


def ranks_reordered(x, size):
    return torch.cat(x.chunk(size, 1)[::-1], 1)


def cp_work(transport, x, reverse, K, share, impl=None):
    """Results and gradients of a rank; share: its part of the gradient of the terminal states, or None."""
    mine = [t.chunk(transport.size, 1)[transport.rank].clone().requires_grad_() for t in x]
    got = frame.cp_frame_gdn_scan(*mine, transport, reverse, K, allgather_impl=impl)
    loss = got[0].sum() + 0.7 * got[1].sum()
    if share is not None and share[transport.rank]:
        loss = loss + share[transport.rank] * (got.terminal_state_kv.square().sum() + got.terminal_state_z.sum())
    loss.backward()
    return got, [t.grad for t in mine]


def check_cp(results, x, size, reverse, K, share, bound):
    full = [t.detach().clone().double().requires_grad_() for t in x]
    ordered = [ranks_reordered(t, size) for t in full] if reverse else full
    S, z, state, final_z = recurrence(*ordered, active=K)
    loss = S.sum() + 0.7 * z.sum()
    if share is not None:
        loss = loss + sum(share) * (state.square().sum() + final_z.sum())
    loss.backward()
    if reverse:
        S, z = ranks_reordered(S, size), ranks_reordered(z, size)
    close(torch.cat([r[0][0] for r in results], 1), S, bound, "S_kv_all")
    close(torch.cat([r[0][1] for r in results], 1), z, bound, "S_z_all")
    for i, t in enumerate(full):
        close(torch.cat([r[1][i] for r in results], 1), t.grad, 10 * bound, f"gradient {i}")
    for got, _ in results:
        assert len(got) == (2 if K is None else 4) and isinstance(got, frame.CpFrameGdnScanResult) == (K is not None)
        if K is not None:
            close(got.terminal_state_kv, state, bound, "terminal_state_kv")
            close(got.terminal_state_z, final_z, bound, "terminal_state_z")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_cp_scan(dtype):
    for size in (1, 2, 3, 4):
        for T_local in (1, 3):
            x = cp_problem(size * T_local, dtype)
            for reverse in (False, True):
                results, _ = simulate(size, cp_work, x, reverse, None, None)
                check_cp(results, x, size, reverse, None, None, BOUND[dtype])


def test_cp_scan_truncated():
    """Every length, edges of ranks included; the terminal state's gradient from all ranks, some, none."""
    x = cp_problem(9)
    for K in range(1, 10):
        for share in ([1.0, 1.0, 1.0], [0, 0.5, 0], [0, 0, 2.0], [0, 0, 0]):
            results, _ = simulate(3, cp_work, x, False, K, share)
            check_cp(results, x, 3, False, K, share, 1e-12)


def test_cp_scan_does_not_read_the_padding():
    x = cp_problem(9)
    dirty = [t.clone() for t in x]
    for t in dirty:
        t[:, 5:] = float("nan")
    for K in (5,):
        clean, _ = simulate(3, cp_work, x, False, K, [1, 1, 1])
        got, _ = simulate(3, cp_work, dirty, False, K, [1, 1, 1])
        for (a, da), (b, db) in zip(got, clean):
            for one, other in zip((*a, *da), (*b, *db)):
                assert torch.equal(one, other)


def test_cp_scan_where_products_overflow():
    """W = 1e30 Id: products of two overflow in float32, the states do not."""
    W = 1e30 * torch.eye(3).expand(1, 4, 3, 3)
    U = torch.zeros(1, 4, 3, 3)
    U[:, 3] = torch.randn(3, 3)
    u = torch.zeros(1, 4, 3)
    u[:, 3] = 1
    results, _ = simulate(2, cp_work, [W, U, W, u], False, 4, [1, 1])
    S = torch.cat([r[0].S_kv_all for r in results], 1)
    assert torch.equal(S, U) and torch.equal(results[0][0].terminal_state_kv, U[:, 3])


def test_cp_scan_in_16_bits():
    for dtype in (torch.bfloat16, torch.float16):
        x = cp_problem(6, dtype, D=16)
        results, _ = simulate(3, cp_work, x, False, 5, [1, 0, 0])
        assert {r[0][i].dtype for r in results for i in range(4)} == {dtype}
        full = [t.double() for t in x]
        S, z, state, _ = recurrence(*full, active=5)
        close(torch.cat([r[0].S_kv_all for r in results], 1), S, BOUND[dtype])
        close(results[2][0].terminal_state_kv, state, BOUND[dtype])


def test_cp_scan_refuses():
    x = cp_problem(4)
    with pytest.raises(NotImplementedError, match="reverse"):
        frame.cp_frame_gdn_scan(*x, None, True, 2)
    for K in (0, -1, 5):
        with pytest.raises(ValueError, match="truncate_to_active"):
            frame.cp_frame_gdn_scan(*x, None, truncate_to_active=K)

    def work(transport):
        for K in (0, 9):
            with pytest.raises(ValueError, match="expected 1 to 8"):
                frame.cp_frame_gdn_scan(*x, transport, truncate_to_active=K)
        with pytest.raises(ValueError, match="allgather_impl"):
            frame.cp_frame_gdn_scan(*x, transport, allgather_impl="ring")
        with pytest.raises(ValueError, match="U has shape"):
            frame.cp_frame_gdn_scan(x[0], x[1][:, :2], *x[2:], transport)

    simulate(2, work)


def test_cp_scan_alone():
    """Without torch.distributed it is the scan of one process."""
    x = [t.requires_grad_() for t in cp_problem(4)]
    for K in (None, 3):
        got = frame.cp_frame_gdn_scan(*x, None, truncate_to_active=K)
        want = recurrence(*x, active=K)
        for a, b in zip(got, want):
            close(a, b, 1e-12)
    got[2].sum().backward()
    assert x[0].grad[:, 3:].abs().max() == 0 and x[0].grad.abs().max() > 0
    S, z = frame.cp_frame_gdn_scan(*x[:2], None, None, None)
    assert z is None and S.shape == x[1].shape


# ---------------------------------------------------------------- gloo

def gloo(size, name, tmp_path, timeout=240, **variables):
    """Runs a function of this file in as many processes as ranks."""
    here = os.path.dirname(os.path.abspath(__file__))
    code = f"import sys; sys.path[:0] = [{here!r}, {os.path.dirname(here)!r}]; import test_frame; test_frame.start(*sys.argv[1:])"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GDN_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **variables}
    ranks = [subprocess.Popen([sys.executable, "-c", code, name, str(rank), str(size), str(tmp_path / name)], env=environment, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True) for rank in range(size)]
    try:
        said = [process.communicate(timeout=timeout)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0] * size, "\n".join(text[-3000:] for text in said)


def start(name, rank, size, path):
    import datetime

    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(42)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=int(rank), world_size=int(size), timeout=datetime.timedelta(seconds=60))
    globals()[name](dist)
    dist.destroy_process_group()


def gathered(dist, value, group=None):
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def cp_on_gloo(dist, x, reverse, K, share, impl=None, group=None):
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    mine = [t.chunk(size, 1)[rank].clone().requires_grad_() for t in x]
    got = frame.cp_frame_gdn_scan(*mine, group, reverse, K, allgather_impl=impl)
    loss = got[0].sum() + 0.7 * got[1].sum()
    if share is not None and share[rank]:
        loss = loss + share[rank] * (got.terminal_state_kv.square().sum() + got.terminal_state_z.sum())
    loss.backward()
    results = gathered(dist, ([t.detach() for t in got], [t.grad for t in mine]), group)
    results = [(frame.CpFrameGdnScanResult(*r) if K is not None else tuple(r), g) for r, g in results]
    check_cp(results, x, size, reverse, K, share, BOUND[x[0].dtype])


def every_gather(dist):
    size = dist.get_world_size()
    x = cp_problem(3 * size)
    for impl in ("collective", "list", "p2p"):
        for reverse in (False, True):
            cp_on_gloo(dist, x, reverse, None, None, impl)
        for K in (1, 3 * size - 2):
            cp_on_gloo(dist, x, False, K, [1.0] * size, impl)
            cp_on_gloo(dist, x, False, K, [0.0] * (size - 1) + [1.0], impl)  # the others leave the terminal state out
    with pytest.raises(ValueError, match="allgather_impl"):
        cp_on_gloo(dist, x, False, None, None, "tree")
    os.environ["CP_ALLGATHER_IMPL"] = "p2p"
    cp_on_gloo(dist, x, False, None, None)
    del os.environ["CP_ALLGATHER_IMPL"]


def sub_groups(dist):
    """Two groups, interleaved, that work at the same time, one the other way round; and a group of one."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    single = dist.new_group([3])
    torch.manual_seed(rank % 2)
    x = cp_problem(4)
    cp_on_gloo(dist, x, rank % 2 == 1, None, None, group=pairs[rank % 2])
    cp_on_gloo(dist, x, False, 3, [0.5, 0], group=pairs[rank % 2])
    if rank == 3:
        cp_on_gloo(dist, x, False, 3, [1.0], group=single)
        cp_on_gloo(dist, x, True, None, None, group=single)


def own_form(dist):
    """The better form, live calls interleaved, their backwards in the other order; some inputs without a gradient on a rank."""
    size, rank = dist.get_world_size(), dist.get_rank()
    x = problem(T=2 * size + 1)
    lengths = [2] * (size - 1) + [3]
    first, second = cut(x, lengths, rank), cut(x, lengths, rank)
    if rank == 0:
        second["U"].requires_grad_(False)
    a = frame.scan(**first, group=dist.group.WORLD, output_final_state=True)
    b = frame.scan(**second, group=dist.group.WORLD, reverse=True, exclusive=True, allgather_impl="list")
    b.S.sum().backward()
    (a.S.sum() + (a.final_state * rank).sum()).backward()
    exact = {n: t.detach().clone().requires_grad_() for n, t in x.items()}
    want = recurrence(**exact)
    (want[0].sum() + want[2].sum() * sum(range(size))).backward()
    begin = sum(lengths[:rank])
    close(first["W"].grad, exact["W"].grad[:, begin:begin + lengths[rank]], 1e-11)
    if rank == 0:
        close(first["initial_state"].grad, exact["initial_state"].grad, 1e-11)
    exact = {n: t.detach().clone().requires_grad_() for n, t in x.items()}
    recurrence(**exact, reverse=True, exclusive=True)[0].sum().backward()
    close(second["W"].grad, exact["W"].grad[:, begin:begin + lengths[rank]], 1e-11)


def lost_rank(dist):
    """A rank that never comes is an error on the others within the group's patience."""
    import datetime

    group = dist.new_group(timeout=datetime.timedelta(seconds=3))
    if dist.get_rank() == 1:
        return
    x = problem(grad=False)
    with pytest.raises(RuntimeError, match="rank 0 of 2 failed gathering"):
        frame.scan(**x, group=group, output_final_state=True)


@pytest.mark.parametrize("size", [3, pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_every_gather_on_gloo(size, tmp_path):
    gloo(size, "every_gather", tmp_path)


@pytest.mark.slow
def test_sub_groups_on_gloo(tmp_path):
    gloo(4, "sub_groups", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_own_form_on_gloo(size, tmp_path):
    gloo(size, "own_form", tmp_path)


@pytest.mark.slow
def test_a_lost_rank_is_an_error(tmp_path):
    gloo(2, "lost_rank", tmp_path)
