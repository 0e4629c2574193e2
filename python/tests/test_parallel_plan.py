"""SequencePlan held to its definition, computed token by token, and the protocols held to the plain recurrence of maps."""

import random

import pytest

torch = pytest.importorskip("torch")

from ranks import simulate  # noqa: E402

from gdn.parallel import protocols  # noqa: E402
from gdn.parallel.plan import SequencePlan  # noqa: E402


def layout(rng, ranks=None, documents=None, longest=9):
    """Random offsets and shard lengths, with empty documents and empty shards."""
    P = ranks or rng.randint(1, 8)
    lengths = [rng.choice((0, 1, rng.randint(0, longest))) for _ in range(P)]
    if rng.random() < 0.3:
        lengths = [rng.randint(1, longest)] * P
    N = sum(lengths)
    D = documents or rng.randint(1, 7)
    inner = [rng.randint(0, N) for _ in range(D - 1)]
    borders = [sum(lengths[:r]) for r in range(P + 1)]
    inner = [rng.choice(borders) if rng.random() < 0.3 else o for o in inner]
    return [0, *sorted(inner), N], lengths


def documents_of(offsets):
    """The document of each token."""
    return [d for d, (a, b) in enumerate(zip(offsets, offsets[1:])) for _ in range(b - a)]


@pytest.mark.parametrize("seed", range(20))
def test_plan_against_tokens(seed):
    rng = random.Random(seed)
    for _ in range(60):
        offsets, lengths = layout(rng)
        P, owner = len(lengths), documents_of(offsets)
        borders = [sum(lengths[:r]) for r in range(P + 1)]
        plans = [SequencePlan(offsets, lengths, r) for r in range(P)]
        crossing = [0 < b < len(owner) and owner[b - 1] == owner[b] for b in borders[1:-1]]
        begun, ended = [], []
        for r, plan in enumerate(plans):
            a, b = borders[r], borders[r + 1]
            assert (plan.start, plan.end, plan.tokens, plan.size, plan.rank) == (a, b, b - a, P, r)
            assert plan.global_offsets == tuple(offsets) and plan.edges == tuple(crossing)
            assert plan.crosses == any(crossing)
            mine = owner[a:b]
            fragments = [[t for t in range(a, b) if owner[t] == d] for d in dict.fromkeys(mine)] or [[]]
            assert plan.num_sequences == len(fragments) == len(plan.fragments)
            assert plan.local_offsets == (*[f[0] - a if f else 0 for f in fragments], b - a)
            assert (plan.head, plan.tail) == (slice(0, len(fragments[0])), slice(b - a - len(fragments[-1]), b - a))
            assert plan.continues_previous == (r > 0 and crossing[r - 1])
            assert plan.continues_next == (r < P - 1 and crossing[r])
            assert plan.transfer_active == (len(fragments) == 1 and plan.continues_previous)
            before = [t for t in range(a) if a < len(owner) and owner[t] == owner[a]]
            assert plan.preceding_sample_tokens == (len(before) if a < len(owner) else 0)
            assert plan.passes[r] == (plan.continues_previous and plan.continues_next and len(fragments) == 1)
            assert [d for d in plan.fragments if d is not None] == [owner[f[0]] for f in fragments if f] or a == b
            begun += [(d, r) for _, d in plan.begins] + [(d, r) for d in plan.empty]
            ended += [(d, r) for _, d in plan.ends] + [(d, r) for d in plan.empty]
            for f, d in plan.begins:
                assert a + plan.local_offsets[f] == offsets[d] < b
            for f, d in plan.ends:
                assert a + plan.local_offsets[f + 1] == offsets[d + 1] > a
            # Ranks with a map that reaches this one, walked edge by edge.
            first = r
            while first > 0 and crossing[first - 1] and (first == r or plans[first].passes[first]):
                first -= 1
            last = r
            while last < P - 1 and crossing[last] and (last == r or plans[last].passes[last]):
                last += 1
            assert (plan.first_rank, plan.last_rank, plan.prefix, plan.suffix) == (first, last, r - first, last - r)
            for rows in (0, 1, 3, 50):
                tokens = [t for rank, x, y in plan.halo(rows) for t in range(x, y) if borders[rank] <= t < borders[rank + 1]]
                assert tokens == (before[-rows:] if rows else [])
            assert plan.at(P - 1 - r) == plans[P - 1 - r]
            chunks = [(f, c) for f, t in enumerate(fragments) for c in range(-(-len(t) // 4))]
            assert plan.chunk_indices(4) == tuple(i for pair in chunks for i in pair)
        # Each document begins on one rank and ends on one; `owner` names them.
        for places, which in ((begun, 0), (ended, 1)):
            assert sorted(d for d, _ in places) == list(range(len(offsets) - 1))
            assert all(plans[0].owner(d)[which] == r for d, r in places)


def test_plan_of_equal_shards_is_upstreams():
    """The values that flash-linear-attention's own context test names: offsets 0, 5, 12 on 3 ranks."""
    plan = SequencePlan([0, 5, 12], 3, 1)
    assert plan.local_offsets == (0, 1, 4) and plan.preceding_sample_tokens == 4
    assert (plan.prefix, plan.suffix) == (1, 1) and not plan.transfer_active
    made = plan.materialize("cpu", 2)
    assert made.cu_seqlens.tolist() == [0, 1, 4] and made.cu_seqlens.dtype == torch.int32
    assert made.chunk_indices.tolist() == [[0, 0], [1, 0], [1, 1]] and plan.materialize("cpu", 2) is made


def test_states_of_fragments():
    x = torch.arange(6.0).view(1, 1, 2, 3)
    middle, end = SequencePlan([0, 5, 12], 3, 1), SequencePlan([0, 5, 12], 3, 2)
    assert torch.equal(middle.first_state(x), torch.cat((x, x * 0))) and torch.equal(middle.last_state(x), torch.cat((x * 0, x)))
    assert torch.equal(end.first_state(x), x) and not end.last_state(x).any()
    start = SequencePlan([0, 5, 12], 3, 0)
    assert not start.first_state(x).any() and torch.equal(start.last_state(x), x)


@pytest.mark.parametrize("arguments, message", [
    (([1, 4], [4], 0), "begins with 1"), (([0], [0], 0), "expected at least 2"), (([0, 3, 2, 4], [4], 0), "decreases from 3 to 2 at 2"),
    (([0, 4], [1, 2], 0), "hold 3 tokens, the documents 4"), (([0, 4], [5, -1], 0), "length of at least 0"), (([0, 5], 2, 0), "equal length"),
    (([0, 4], [2, 2], 2), "rank is 2"), (([0, 4], [2, 2], True), "rank is True"), (([0, 4.0], [4], 0), "offsets[1] is 4.0"),
    (([0, True], [1], 0), "offsets[1] is True"), ((torch.tensor([0.0, 4.0]), [4], 0), "float32"), ((torch.tensor([[0, 4]]), [4], 0), "[1, 2]"),
    ((torch.empty(2, dtype=torch.int32, device="meta"), [4], 0), "on meta"), ((7, [4], 0), "offsets is 7"), (([0, 4], [], 0), "lengths is []"),
])
def test_plan_refuses(arguments, message):
    with pytest.raises(ValueError) as caught:
        SequencePlan(*arguments)
    assert str(caught.value).startswith("SequencePlan: ") and message in str(caught.value)


def test_plan_takes_tensors_and_numpy_integers():
    numpy = pytest.importorskip("numpy")
    for dtype in (torch.int32, torch.int64):
        assert SequencePlan(torch.tensor([0, 5, 12], dtype=dtype), 3, 1) == SequencePlan((0, 5, 12), [4, 4, 4], 1)
    assert SequencePlan(numpy.array([0, 5, 12]), numpy.int64(3), 1) == SequencePlan([0, 5, 12], 3, 1)


SHAPE = (1, 2, 3, 4)
PROTOCOLS = [protocols.p2p, protocols.all_gather, protocols.recursive_doubling]


def run_protocol(transport, protocol, offsets, lengths, reverse, maps):
    plan = SequencePlan(offsets, lengths, transport.rank)
    S, M = maps
    exchange = protocol.exchange(transport, plan, reverse, S, SHAPE)
    packed = None
    if exchange.needs_map:
        packed = torch.cat((S[transport.rank], M[transport.rank]), -1)
        if not exchange.needs_matrix:
            packed[..., 4:] = torch.nan  # of no consequence
    x = exchange.state(packed)
    x = None if x is None else x.clone()
    exchange.close()
    assert not exchange.pending
    return x


def expected_states(offsets, lengths, reverse, S, M):
    """The state that enters each rank: from where the document begins on, map by map."""
    P, owner = len(lengths), documents_of(offsets)
    borders = [sum(lengths[:r]) for r in range(P + 1)]
    order = list(range(P - 1, -1, -1) if reverse else range(P))
    found, x = [None] * P, None
    for before, r in zip([None, *order], order):
        b = None if before is None else borders[max(before, r)]
        inward = b is not None and 0 < b < len(owner) and owner[b - 1] == owner[b]
        if not inward:
            x = None
        found[r] = x
        # Only one document on the shard, so that what came in goes on: of none it is the one that spans it.
        here = set(owner[borders[r]:borders[r + 1]])
        x = S[r] + M[r] @ x if x is not None and len(here) <= 1 else S[r]
    return found


def check_protocol(protocol, offsets, lengths, reverse):
    P, draw = len(lengths), torch.Generator().manual_seed(len(lengths))
    S, M = torch.randn(P, *SHAPE, dtype=torch.float64, generator=draw), torch.randn(P, *SHAPE[:3], 3, dtype=torch.float64, generator=draw) * 0.6
    got, wires = simulate(P, run_protocol, protocol, offsets, lengths, reverse, (S, M))
    want = expected_states(offsets, lengths, reverse, S, M)
    for r in range(P):
        assert (got[r] is None) == (want[r] is None), f"rank {r} of {offsets} on {lengths}"
        if want[r] is not None:
            torch.testing.assert_close(got[r], want[r], rtol=1e-13, atol=1e-13)
    return got, wires


def widths(P):
    return [protocols.grouped(w) for w in range(1, P + 1) if P % w == 0]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("P", [1, 2, 3, 4, 5, 6, 8, 13, 16])
def test_protocols_on_one_document(P, reverse):
    for protocol in PROTOCOLS + widths(P):
        _, wires = check_protocol(protocol, [0, 3 * P], [3] * P, reverse)
        if protocol == protocols.p2p:
            step = -1 if reverse else 1
            order = range(P - 1, 0, -1) if reverse else range(P - 1)
            assert sorted(wires.sent) == sorted((r, r + step, 24) for r in order)


@pytest.mark.parametrize("seed", range(6))
def test_protocols_on_random_layouts(seed):
    rng = random.Random(100 + seed)
    for _ in range(12):
        offsets, lengths = layout(rng, rng.choice((2, 3, 4, 6, 8)), rng.choice((1, 2, 3, 6)))
        plan = SequencePlan(offsets, lengths, 0)
        for reverse in (False, True):
            results = []
            for protocol in PROTOCOLS + widths(len(lengths)):
                got, wires = check_protocol(protocol, offsets, lengths, reverse)
                if not isinstance(protocol, type(protocols.recursive_doubling)):
                    results.append(got)
                if not plan.crosses:
                    assert not wires.sent
                if protocol == protocols.p2p:
                    edges = [(r + 1, r) if reverse else (r, r + 1) for r, crossed in enumerate(plan.edges) if crossed]
                    assert sorted(wires.sent) == sorted((a, b, 24) for a, b in edges)
            # All but recursive doubling apply the same maps in the same order: equal in every bit.
            for other in results[1:]:
                assert all(a is None and b is None or torch.equal(a, b) for a, b in zip(results[0], other))


def test_recursive_doubling_messages():
    """On 8 ranks 14 messages in three rounds and 7 of the shift; a map that reaches the document's beginning goes without its matrix."""
    for reverse in (False, True):
        _, wires = check_protocol(protocols.recursive_doubling, [0, 16], [2] * 8, reverse)
        assert len(wires.sent) == 21
        assert sum(n for _, _, n in wires.sent) == 7 * 24 + 14 * 24 + (5 + 3) * 18


def test_grouped_relays_once_between_blocks():
    _, wires = check_protocol(protocols.grouped(4), [0, 16], [2] * 8, False)
    assert [(a, b) for a, b, _ in wires.sent if a // 4 != b // 4] == [(3, 7)]


@pytest.mark.parametrize("width", [0, -1, True, 1.0, "2"])
def test_width_is_checked(width):
    with pytest.raises(ValueError, match="expected a positive integer"):
        protocols.grouped(width)


def test_width_divides_the_size():
    with pytest.raises(ValueError, match=r"grouped\(3\) on 4 ranks"):
        protocols.grouped(3).check(4)
