"""The short convolution and its halo over ranks, held to the convolution of each document on its own."""

import random

import pytest

torch = pytest.importorskip("torch")

from ranks import simulate  # noqa: E402
from test_parallel_plan import layout  # noqa: E402

import gdn  # noqa: E402
from gdn import parallel  # noqa: E402


def whole(x, weight, bias, offsets, dilation, silu):
    """Tap by tap, document by document."""
    y = x * 0
    for a, b in zip(offsets, offsets[1:]):
        part, W = x[:, a:b], weight.shape[-1]
        for tap in range(W):
            back = (W - 1 - tap) * dilation
            if back < b - a:
                y[:, a + back:b] += part[:, :b - a - back] * weight[:, tap]
    y = y if bias is None else y + bias
    return y * y.sigmoid() if silu else y


def convolve(transport, offsets, lengths, x, weight, bias, dilation, silu, dy, wrap=lambda f, *args: f(*args)):
    r = transport.rank
    begin = sum(lengths[:r])
    mine = slice(begin, begin + lengths[r])
    cp = parallel.ContextParallel(transport=transport)
    bound = cp.bind(parallel.SequencePlan(offsets, lengths, r))
    leaves = [t.detach().clone().requires_grad_() for t in (x[:, mine], weight, *([] if bias is None else [bias]))]
    y = wrap(lambda *given: gdn.causal_conv1d(*given, activation="silu" if silu else None, cp=bound, dilation=dilation)[0], *leaves)
    return (y.detach(), *torch.autograd.grad(y, leaves, dy[:, mine]))


def check(offsets, lengths, W, dilation=1, bias=True, silu=True, B=1, D=3, **options):
    x, weight, b = torch.randn(B, offsets[-1], D), torch.randn(D, W), torch.randn(D) if bias else None
    x, weight, b = (None if t is None else t.double().requires_grad_() for t in (x, weight, b))
    dy = torch.randn_like(x)
    y = whole(x, weight, b, offsets, dilation, silu)
    want = [y, *torch.autograd.grad(y, [t for t in (x, weight, b) if t is not None], dy, materialize_grads=True)]
    ranks, wires = simulate(len(lengths), convolve, offsets, lengths, x.detach(), weight.detach(), b if b is None else b.detach(), dilation, silu,
                            dy, *options.values())
    found = list(zip(*ranks))
    for got, wanted in zip([torch.cat(found[0], 1), torch.cat(found[1], 1), *map(sum, found[2:])], want):
        torch.testing.assert_close(got, wanted.detach(), rtol=1e-12, atol=1e-12)
    return wires


@pytest.mark.parametrize("seed", range(6))
def test_random_layouts(seed):
    rng = random.Random(seed)
    for _ in range(12):
        offsets, lengths = layout(rng, rng.choice((1, 2, 3, 4, 6, 8)))
        check(offsets, lengths, rng.choice((1, 2, 4, 7)), rng.choice((1, 1, 2)), rng.random() < 0.5, rng.random() < 0.5)


def test_reaches_over_short_and_empty_shards():
    wires = check([0, 12], [5, 1, 0, 1, 1, 4], 4, B=2)
    forward = [(a, b) for a, b, _ in wires.sent if a < b]
    assert sorted(forward) == [(0, 1), (0, 3), (0, 4), (1, 3), (1, 4), (1, 5), (3, 4), (3, 5), (4, 5)]
    assert sorted((b, a) for a, b, _ in wires.sent if a > b) == sorted(forward)


def test_nothing_is_sent_where_no_document_crosses():
    assert not check([0, 4, 4, 8], [4, 4], 4).sent


def test_rows_before_the_document_are_neither_read_nor_given_a_gradient():
    """Document 1 begins 2 tokens before the border: of a halo of 3 rows one is zero, and what lies there has no gradient from it."""
    wires = check([0, 2, 8], [4, 4], 4, D=2)
    assert wires.sent == [(0, 1, 2 * 2), (1, 0, 2 * 2)]


def test_checkpoint_keeps_the_halo():
    plain = check([0, 8], [4, 4], 4)
    again = check([0, 8], [4, 4], 4, wrap=parallel.checkpoint)
    assert sorted(again.sent) == sorted(plain.sent)
    repeated = check([0, 8], [4, 4], 4, wrap=lambda f, *args: torch.utils.checkpoint.checkpoint(f, *args, use_reentrant=False))
    assert len(repeated.sent) == len(plain.sent) + 1


@pytest.mark.parametrize("arguments, message", [
    (dict(rows=-1), "has -1 rows"), (dict(rows=True), "has True rows"), (dict(T=5), "x has shape [1, 5, 3], expected [B, T=4, D]"),
    (dict(B=2), "expected B=1 with 2 packed documents"),
])
def test_halo_refuses(arguments, message):
    def work(transport):
        cp = parallel.ContextParallel(transport=transport)
        x = torch.randn(arguments.get("B", 1), arguments.get("T", 4), 3)
        with pytest.raises(ValueError) as caught:
            parallel.halo(x, arguments.get("rows", 3), cp.bind([0, 3, 8]))
        assert message in str(caught.value)

    assert not simulate(2, work)[1].sent


@pytest.mark.parametrize("P, documents", [
    (2, [300, 400, 324]), (2, [512, 512]), (2, [100, 150, 200, 250, 124, 100, 100]), (2, [513, 511]), (2, [514, 510]), (2, [200, 313, 511]),
    (2, [512, 1, 511]), (4, [700, 324]), (4, [1024]), (4, [257, 255, 257, 255]), (4, [257, 253, 257, 257]),
])
def test_layouts_of_fla(P, documents):
    check([sum(documents[:i]) for i in range(len(documents) + 1)], [1024 // P] * P, 4, D=8)
