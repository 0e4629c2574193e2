"""Ranks that are processes, with gloo: groups and sub-groups, and what happens when a rank fails or disagrees."""

import os
import random
import time

import pytest

torch = pytest.importorskip("torch")

import reference  # noqa: E402
import torch.distributed as dist  # noqa: E402
from ranks import Processes  # noqa: E402
from test_parallel import RULES, Case, gates, head_protocols, state_protocols  # noqa: E402
from test_parallel_plan import PROTOCOLS, SHAPE, expected_states, layout, run_protocol, widths  # noqa: E402

import gdn  # noqa: E402
from gdn import parallel  # noqa: E402
from gdn.parallel.transport import Transport  # noqa: E402

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="PyTorch without gloo")


@pytest.fixture(scope="module")
def world():
    processes = Processes(8)
    yield processes
    processes.close()


def states(group, offsets, lengths, maps):
    """What each protocol brings, in both directions; two calls live at once, and their backwards in either order."""
    transport, found = Transport(group), []
    for protocol in PROTOCOLS + widths(len(lengths)):
        for reverse in (False, True):
            found.append(run_protocol(transport, protocol, offsets, lengths, reverse, maps))
    return found


LAYOUTS = {
    1: ([0, 3, 4], [4]), 2: ([0, 3, 3, 9], [5, 4]), 3: ([0, 9], [4, 0, 5]), 4: ([0, 2, 11, 12], [3, 3, 3, 3]), 6: ([0, 1, 12], [2] * 6),
    8: ([0, 16], [2] * 8),
}


@pytest.mark.parametrize("P", [1, 2, 3, 4, 6, 8])
def test_protocols(world, P):
    offsets, lengths = LAYOUTS[P]
    S, M = torch.randn(P, *SHAPE), torch.randn(P, *SHAPE[:3], SHAPE[2]) * 0.6
    ranks = world.on_group(range(P), states, offsets, lengths, (S, M))
    want = [expected_states(offsets, lengths, reverse, S.double(), M.double()) for reverse in (False, True)]
    for r, found in enumerate(ranks):
        for i, got in enumerate(found):
            expected = want[i % 2][r]
            assert (got is None) == (expected is None)
            if got is not None:
                torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_interleaved_groups(world):
    """Two groups of three of the world's ranks, one in between the other, at the same time."""
    S, M = torch.randn(3, *SHAPE), torch.randn(3, *SHAPE[:3], SHAPE[2])
    results = world.run(interleaved, (S, M))
    want = expected_states([0, 6], [2, 2, 2], False, S.double(), M.double())
    for members in ([0, 3, 5], [1, 2, 6]):
        for position, rank in enumerate(members):
            for got in results[rank]:
                assert (got is None) == (want[position] is None)
                if got is not None:
                    torch.testing.assert_close(got.double(), want[position], rtol=1e-5, atol=1e-5)
    assert results[4] is None and results[7] is None


def interleaved(maps):
    mine = None
    for members in ([0, 3, 5], [1, 2, 6]):
        group = dist.new_group(members)
        mine = group if dist.get_rank() in members else mine
    return states(mine, [0, 6], [2, 2, 2], maps)[::2] if mine not in (None, dist.GroupMember.NON_GROUP_MEMBER) else None


def refusals(group):
    """The sentences of what is refused before anything is sent."""
    def sentence(function):
        with pytest.raises(ValueError) as caught:
            function()
        return str(caught.value)

    cp = parallel.ContextParallel(group, "p2p")
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    found = [
        sentence(lambda: parallel.ContextParallel(group, "p2p" if rank else "all_gather")),
        sentence(lambda: parallel.ContextParallel(group, parallel.grouped(2))),
        sentence(lambda: parallel.ContextParallel(group, "ring")),
        sentence(lambda: cp.bind(parallel.SequencePlan([0, 8], [4, 4], min(rank, 1)))),
        sentence(lambda: cp.bind(parallel.SequencePlan([0, 9], size, (rank + 1) % size))),
        sentence(lambda: cp.bind([0, 4, 9] if rank else [0, 5, 9])),
    ]
    assert cp.traffic.messages == 0
    return found


def test_disagreement_is_found_first(world):
    for rank, found in enumerate(world.on_group(range(3), refusals)):
        assert "the protocol differs between the ranks: all_gather on rank 0, p2p on rank 1" in found[0]
        assert "grouped(2) on 3 ranks" in found[1]
        assert "protocol is 'ring', expected one of auto, p2p" in found[2]
        assert f"the plan is for rank {min(rank, 1)} of 2, this is rank {rank} of 3" in found[3]
        assert f"the plan is for rank {(rank + 1) % 3} of 3, this is rank {rank} of 3" in found[4]
        assert "the plan differs between the ranks: ((0, 5, 9), (0, 3, 6, 9))" in found[5] and "((0, 4, 9), (0, 3, 6, 9))" in found[5]


def outsider(members):
    group = dist.new_group(members)
    if dist.get_rank() in members:
        return parallel.ContextParallel(group).size
    with pytest.raises(ValueError, match="is not in the group|no process group"):
        parallel.ContextParallel(group)


def test_rank_outside_the_group(world):
    assert world.run(outsider, [1, 2]) == [None, 2, 2, None, None, None, None, None]


# A rank that fails.

def wait_for_state(case, protocol):
    """Rank 1 of 3 does what the case says; the others run an exchange. Returns (seconds, sentence)."""
    rank = dist.get_rank()
    cp = parallel.ContextParallel(protocol=protocol)
    plan = parallel.SequencePlan([0, 6], 3, rank)
    if rank == 1:
        if case == "dies":
            os._exit(3)
        if case == "leaves it out":
            time.sleep(4)
        return None
    begin = time.monotonic()
    try:
        maps = torch.randn(3, *SHAPE), torch.randn(3, *SHAPE[:3], SHAPE[2])
        exchange = cp.protocol.exchange(cp.transport, plan, False, maps[0], SHAPE)
        exchange.state(torch.cat([m[rank] for m in maps], -1) if exchange.needs_map else None)
        exchange.close()
    except RuntimeError as error:
        return time.monotonic() - begin, str(error)
    return time.monotonic() - begin, None


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["p2p", "all_gather", "recursive_doubling"])
@pytest.mark.parametrize("case", ["dies", "leaves it out"])
def test_a_rank_that_fails_is_an_error_on_the_others(case, protocol):
    processes = Processes(3, patience=2)
    try:
        processes.begin(wait_for_state, case, protocol)
        answers = [processes.collect(rank, 40) for rank in range(3)]
        waited, sentence = answers[2][0]
        assert waited < 15 and sentence is not None and sentence.startswith("gdn.parallel: rank 2 of 3 failed ")
        assert "another plan" in sentence
    finally:
        processes.close()


def contexts(group):
    """Contexts as flash-linear-attention's own test has them, and what they compute."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for tokens in (2, 10):
        with pytest.raises(ValueError, match=f"{tokens} tokens cannot be cut into equal shards for 3 ranks"):
            parallel.build_cp_context(torch.tensor([0, tokens]), group)
    offsets = torch.tensor([0, 5, 12])
    context = parallel.build_cp_context(offsets, group, conv1d_kernel_size=4)
    assert context.is_cp_enabled and context.copy_for_backward() == context and context.conv1d_kernel_size == 4
    if rank == 1:
        assert context.cu_seqlens.tolist() == [0, 1, 4] and context.cu_seqlens.dtype == torch.int32 and context.num_seqs == 2
        assert (context.pre_num_conv_tokens, context.pre_num_ranks, context.post_num_ranks) == (4, 1, 1)
        assert not context.is_first_rank and not context.is_last_rank
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(1, 12, 2, 4, generator=draw)
    whole = gdn.chunk_gated_delta_rule(x, x, x, cu_seqlens=offsets, use_qk_l2norm_in_kernel=True)[0]
    mine = x[:, 4 * rank:4 * rank + 4]
    o, _ = gdn.chunk_gated_delta_rule(mine, mine, mine, use_qk_l2norm_in_kernel=True, cp_context=context)
    torch.testing.assert_close(o, whole[:, 4 * rank:4 * rank + 4], rtol=1e-5, atol=1e-6)
    weight = torch.randn(8, 4, generator=draw)
    y, _ = gdn.causal_conv1d(mine.flatten(2), weight, cp_context=context)
    first, second = (torch.nn.functional.conv1d(torch.nn.functional.pad(part.mT, (3, 0)), weight[:, None], groups=8).mT
                     for part in (x.flatten(2)[:, :5], x.flatten(2)[:, 5:]))
    torch.testing.assert_close(y, torch.cat((first, second), 1)[:, 4 * rank:4 * rank + 4], rtol=1e-5, atol=1e-5)
    assert size == 3


def test_contexts_of_fla(world):
    world.on_group([1, 4, 6], contexts)


def delta_rule(group, case, protocols):
    return [case.run(parallel.ContextParallel(group, protocol)) for protocol in protocols]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("P", [1, 2, 3, 4, 6, 8])
def test_delta_rules(world, P, dtype):
    """Random layouts, every protocol, both rules, over gloo."""
    rng = random.Random(P)
    for i in range(4):
        offsets, lengths = layout(rng, P, longest=30)
        rule = RULES[i % len(RULES)]
        protocols = state_protocols(P) + head_protocols(P)[:4]
        case = Case(rule, offsets, lengths, H=12, HV=12, dtype=dtype, gate=rng.choice(gates(rule)), decay=rng.choice((0.3, 5.0)), seed=i)
        ranks = world.on_group(range(P), delta_rule, case, protocols)
        want = case.expected()
        for protocol, found in zip(protocols, zip(*ranks)):
            for name, t in case.together(found).items():
                reference.check(f"{protocol}: {name}", want[name], t)


def test_delta_rule_quick(world):
    case = Case("gdn", [0, 3, 40, 40, 55], [20, 0, 30, 5], H=4, HV=4)
    want = case.expected()
    for protocol, found in zip(["p2p", "ulysses", "auto"], zip(*world.on_group([0, 2, 5, 7], delta_rule, case, ["p2p", "ulysses", "auto"]))):
        for name, t in case.together(found).items():
            reference.check(f"{protocol}: {name}", want[name], t)
