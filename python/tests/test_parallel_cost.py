"""The cost model: its bytes are those that are sent, and `auto` takes what it says."""

import pytest

torch = pytest.importorskip("torch")

from ranks import simulate  # noqa: E402
from test_parallel_plan import SHAPE, run_protocol  # noqa: E402

from gdn import parallel  # noqa: E402
from gdn.parallel import cost  # noqa: E402
from gdn.parallel.plan import SequencePlan  # noqa: E402


def received(transport, *arguments):
    run_protocol(transport, *arguments)
    return transport.traffic.collective_bytes * (transport.size - 1)


@pytest.mark.parametrize("P", [2, 3, 4, 6, 8, 9, 12, 16])
def test_bytes_are_those_sent(P):
    S, M = torch.randn(P, *SHAPE), torch.randn(P, *SHAPE[:3], SHAPE[2])
    choices = {"p2p": parallel.p2p, "all_gather": parallel.all_gather, "recursive_doubling": parallel.recursive_doubling}
    choices.update({("grouped", w): parallel.grouped(w) for w in range(2, P) if P % w == 0})
    for name, protocol in choices.items():
        for reverse in (False, True):
            gathered, wires = simulate(P, received, protocol, [0, 2 * P], [2] * P, reverse, (S, M))
            most = max(gathered[r] + sum(4 * n for _, to, n in wires.sent if to == r) for r in range(P))
            assert most == cost.estimate(name, P - 1, P, SHAPE).bytes, name


def test_auto_takes_the_cheapest():
    small, large = (1, 8, 64, 64), (1, 32, 128, 128)
    assert cost.cheapest(1, 2, large) == "p2p" and cost.cheapest(1, 64, small) == "p2p"  # one map: whatever the group
    assert cost.cheapest(3, 4, large) == "p2p" and cost.cheapest(3, 4, small) == "all_gather"
    assert cost.cheapest(1023, 1024, large) == cost.cheapest(1023, 1024, small) == "recursive_doubling"
    fast = parallel.Machine(latency=0, overhead=0, bandwidth=1e12, flops=1e9)  # where products cost most, they are spared
    for P in (3, 8, 64):
        assert cost.estimate(cost.cheapest(P - 1, P, large, machine=fast), P - 1, P, large, machine=fast).seconds == min(
            cost.estimate(name, P - 1, P, large, machine=fast).seconds for name in ("p2p", "all_gather", "recursive_doubling"))


def test_auto_goes_by_the_longest_document():
    """32 ranks, each document on two of them: nothing to double."""
    many = SequencePlan([0, *range(1, 64, 2), 64], [2] * 32, 5)
    one = SequencePlan([0, 64], [2] * 32, 5)
    assert max(r - s for r, s in enumerate(many.sources)) == 1
    assert parallel.auto.choose(many, (1, 32, 128, 128), 4) == parallel.p2p
    assert parallel.auto.choose(one, (1, 32, 128, 128), 4) == parallel.recursive_doubling
    assert all(parallel.auto.choose(one.at(r), (1, 32, 128, 128), 4) == parallel.recursive_doubling for r in range(32))
