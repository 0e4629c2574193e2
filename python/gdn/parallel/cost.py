"""What the exchange of states costs, by protocol: the model by which ``auto`` chooses.

A document lies on n + 1 ranks, so the last of them waits for the maps of n. With W the bytes of one state, a message costs latency + 2
overheads + bytes / bandwidth, an overhead is what a rank pays for each message that it sends or takes, and a map [K, V + K] is applied in
2 K K V operations a head and joined with another in 2 K K (V + K). What the last rank waits for, from the time when all maps are there:

    p2p                   n hops of W, with n - 1 maps applied between them
    all_gather            n messages, 2 W each but the first, which is W (all 2 W where one collective brings them); n - 1 maps applied
    grouped(w)            the same inside a block (w - 1 messages), (n + 1) / w - 1 hops of W from block to block with w maps applied for
                          each, and one hop inside the last
    recursive_doubling    log2 n rounds, 2 W with a join each but the last, which is W; then one hop of W

and the bytes that the busiest rank receives: W, (2 n - 1) W, (2 w - 1) W, 2 log2 n W. The figures are written for K = V, where a map is as
large as two states.
"""

import math
from typing import NamedTuple


class Machine(NamedTuple):
    """Figures of the ranks and of what connects them; all ranks need the same ones."""

    latency: float = 20e-6  # seconds
    overhead: float = 4e-6  # seconds a message, on each side
    bandwidth: float = 20e9  # bytes a second and rank
    flops: float = 5e12  # operations a second in products of small matrices


class Estimate(NamedTuple):
    seconds: float
    stages: int  # messages that wait for one another
    bytes: int  # received by the busiest rank


def estimate(protocol, n, size, shape, itemsize=4, machine=Machine()):
    """Estimate of one direction.

    Args:
        protocol: "p2p", "all_gather", ("grouped", width) or "recursive_doubling".
        n: how many ranks' maps the last rank of the longest document waits for.
        size: ranks of the group.
        shape: (B, HV, K, V) of the state.
    """
    if n == 0:
        return Estimate(0.0, 0, 0)
    B, HV, K, V = shape
    state, packed = (B * HV * K * columns * itemsize for columns in (V, V + K))
    applied, joined = (2 * B * HV * K * K * columns / machine.flops for columns in (V, V + K))

    def hop(size, messages=1):
        return machine.latency + (messages + 1) * machine.overhead + size / machine.bandwidth

    if protocol == "p2p":
        return Estimate(n * hop(state) + (n - 1) * applied, n, state)
    if protocol == "all_gather":
        received = n * packed if n + 1 == size > 2 else state + (n - 1) * packed
        return Estimate(hop(received, n) + (n - 1) * applied, 1, received)
    if protocol == "recursive_doubling":
        rounds = math.ceil(math.log2(n))
        if rounds == 0:
            return Estimate(hop(state), 1, state)
        return Estimate((rounds - 1) * (hop(packed) + joined) + hop(state) + applied + hop(state), rounds + 1, (rounds - 1) * packed + 2 * state)
    width = protocol[1]
    relays = math.ceil((n + 1) / width) - 1
    if relays == 0:
        return estimate("all_gather", n, size + 1, shape, itemsize, machine)
    inside = (width - 1) * packed
    return Estimate(hop(inside, width - 1) + relays * (hop(state) + width * applied) + hop(state) + (width - 1) * applied, relays + 2,
                    inside + state)


def cheapest(n, size, shape, itemsize=4, machine=Machine()):
    """The protocol with the smallest estimate; of equal ones the first in this order: p2p, recursive_doubling, all_gather, grouped."""
    choices = ["p2p", "recursive_doubling", "all_gather", *(("grouped", w) for w in range(2, size) if size % w == 0)]
    return min(choices, key=lambda protocol: estimate(protocol, n, size, shape, itemsize, machine).seconds)
