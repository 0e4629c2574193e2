"""The delta rules and the convolution over ranks, held to the recurrence of each document in one process."""

import random

import pytest

torch = pytest.importorskip("torch")

import reference  # noqa: E402
from ranks import simulate  # noqa: E402
from test_parallel_plan import layout  # noqa: E402

import gdn  # noqa: E402
from gdn import parallel  # noqa: E402

TOKENS = ("q", "k", "v", "g", "beta")
LEAVES = (*TOKENS, "A_log", "dt_bias", "initial_state")


class Case:
    """Tensors of a whole sequence, what each rank gets of them, and how results are put together again."""

    def __init__(self, rule, offsets, lengths, B=1, H=2, HV=4, K=5, V=3, dtype=torch.float64, gate="log", beta="plain", decay=0.3,
                 states=True, final=True, seed=0, **options):
        draw = torch.Generator().manual_seed(seed)
        randn = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64)  # noqa: E731
        self.rule, self.offsets, self.lengths, self.final = rule, offsets, lengths, final
        T, self.N = offsets[-1], len(offsets) - 1 if len(offsets) > 2 else B
        wide = (K,) if rule == "kda" else ()
        k = randn(B, T, H, K)
        self.tensors = {"q": randn(B, T, H, K), "k": k / k.norm(dim=-1, keepdim=True), "v": randn(B, T, HV, V)}
        self.options = dict(options)
        if gate == "log":
            self.tensors["g"] = -decay * torch.rand(B, T, HV, *wide, generator=draw, dtype=torch.float64)
        elif gate is not None:
            self.tensors["g"] = randn(B, T, HV, *wide)
            self.tensors["A_log"], self.tensors["dt_bias"] = randn(HV) * 0.3, randn(HV, *wide)
            self.options["use_gate_in_kernel"] = True
            if gate == "bound":
                self.options["lower_bound"] = -5.0
        if beta is not None:
            self.tensors["beta"] = randn(B, T, HV) if beta == "logit" else torch.rand(B, T, HV, generator=draw, dtype=torch.float64)
            if beta == "channel":
                self.tensors["beta"] = torch.rand(B, T, HV, V, generator=draw, dtype=torch.float64)
            self.options["use_beta_sigmoid_in_kernel"] = beta == "logit"
        if states:
            self.tensors["initial_state"] = randn(self.N, HV, K, V)
        self.do, self.dht = randn(B, T, HV, V), randn(self.N, HV, K, V)
        state = torch.float64 if dtype == torch.float64 else torch.float32
        self.tensors = {name: t.to(dtype if name in TOKENS else state) for name, t in self.tensors.items()}
        self.do, self.dht = self.do.to(dtype), self.dht.to(state)

    @property
    def packed(self):
        return len(self.offsets) > 2

    def local(self, name, t, rank):
        begin = sum(self.lengths[:rank])
        return t[:, begin:begin + self.lengths[rank]] if name in (*TOKENS, "do") else t

    def run(self, cp, wrap=lambda function, *args: function(*args), grad=True, bind=True):
        """What one rank computes: {"o", "ht", "dq", ...}."""
        rank = cp.rank
        plan = parallel.SequencePlan(self.offsets, self.lengths, rank)
        leaves = {name: self.local(name, t, rank).detach().clone().requires_grad_(grad) for name, t in self.tensors.items()}
        rule = gdn.chunk_kda if self.rule == "kda" else gdn.chunk_gated_delta_rule

        def call(*given):
            return rule(**dict(zip(leaves, given)), **self.options, output_final_state=self.final, cp=cp.bind(plan) if bind else cp)

        o, ht = wrap(call, *leaves.values())
        found = {"o": o.detach()}
        if self.final:
            found["ht"] = ht.detach()
        if grad:
            outputs = [(o, self.local("do", self.do, rank)), (ht, self.dht)][:2 if self.final else 1]
            gradients = torch.autograd.grad([out for out, _ in outputs], list(leaves.values()), [d for _, d in outputs])
            found.update(("d" + name, d) for name, d in zip(leaves, gradients))
            assert all(found["d" + name].dtype == leaf.dtype and found["d" + name].shape == leaf.shape for name, leaf in leaves.items())
        found["traffic"] = cp.traffic
        return found

    def expected(self):
        """The whole in one process, by the token recurrence in float64."""
        leaves = {name: t.double().requires_grad_() for name, t in self.tensors.items()}
        cu = torch.tensor(self.offsets) if self.packed else None
        o, ht = reference.delta_rule(**leaves, **self.options, cu_seqlens=cu)
        outputs = [(o, self.do.double()), (ht, self.dht.double())][:2 if self.final else 1]
        gradients = torch.autograd.grad([out for out, _ in outputs], list(leaves.values()), [d for _, d in outputs])
        return {"o": o.detach(), **({"ht": ht.detach()} if self.final else {}), **{"d" + name: d for name, d in zip(leaves, gradients)}}

    def together(self, ranks):
        """The results of all ranks as those of one: tokens in order, everything else is a sum of the ranks' parts."""
        whole = {}
        for name in ranks[0]:
            if name != "traffic":
                parts = [found[name] for found in ranks]
                whole[name] = torch.cat(parts, 1) if name in ("o", *("d" + t for t in TOKENS)) else sum(parts)
        return whole

    def check(self, protocol, bound=None, **options):
        """On threads; returns what was sent."""
        ranks, wires = simulate(len(self.lengths), lambda transport: self.run(on_thread(transport, protocol), **options))
        self.hold(self.together(ranks), bound)
        return wires

    def hold(self, found, bound=None):
        want = self.expected()
        assert set(found) == set(want)
        for name, t in want.items():
            reference.check(name, t, found[name], bound)
        return found


def on_thread(transport, protocol):
    return parallel.ContextParallel(protocol=protocol, transport=transport)


def gates(rule):
    return ["log", "softplus", "bound"] if rule == "kda" else ["log", "softplus"]


RULES = ["gdn", "kda"]
STATES = [parallel.p2p, parallel.all_gather, parallel.recursive_doubling, parallel.auto]


def state_protocols(P):
    return STATES + [parallel.grouped(w) for w in range(2, P) if P % w == 0]


def head_protocols(P):
    """For 12 key heads."""
    made = [parallel.ulysses] if 12 % P == 0 else []
    for U in range(2, P):
        if P % U == 0 and 12 % U == 0:
            made += [parallel.hybrid(U, protocol) for protocol in state_protocols(P // U)]
    return made


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(8))
def test_random_layouts(rule, seed):
    rng = random.Random(seed)
    for i in range(4):
        offsets, lengths = layout(rng, rng.choice((1, 2, 3, 4, 6, 8)), rng.choice((1, 2, 4, 7)), longest=rng.choice((9, 40)))
        P = len(lengths)
        protocol = rng.choice(state_protocols(P))
        case = Case(rule, offsets, lengths, B=rng.choice((1, 2)) if len(offsets) == 2 else 1, H=rng.choice((1, 2)), HV=rng.choice((2, 4)),
                    K=rng.choice((3, 5)), V=rng.choice((3, 8)), gate=rng.choice((None, *gates(rule))), beta=rng.choice((None, "plain", "logit")),
                    states=rng.random() < 0.7, final=rng.random() < 0.7, seed=seed, use_qk_l2norm_in_kernel=rng.random() < 0.5)
        case.check(protocol)


ODD = ([0, 7, 7, 8, 150, 150, 163, 220, 220], [40, 1, 0, 70, 69, 40])  # empty documents and shards, a document over five ranks


@pytest.mark.parametrize("rule", RULES)
def test_every_protocol(rule):
    offsets, lengths = ODD
    case = Case(rule, offsets, lengths, H=12, HV=12, K=4, V=3, gate=gates(rule)[-1], beta="logit", use_qk_l2norm_in_kernel=True)
    want = case.expected()
    for protocol in state_protocols(6) + head_protocols(6):
        ranks, _ = simulate(6, lambda transport: case.run(on_thread(transport, protocol)))
        for name, t in case.together(ranks).items():
            reference.check(f"{protocol}: {name}", want[name], t)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("P", [1, 2, 3, 4, 6, 8])
def test_one_document_in_a_batch(rule, P):
    """Not packed; with ``cp=cp`` no plan at all."""
    case = Case(rule, [0, 20 * P], [20] * P, B=2, H=12, HV=24, K=3, V=4)
    want = case.expected()
    for protocol in state_protocols(P) + head_protocols(P):
        ranks, _ = simulate(P, lambda transport: case.run(on_thread(transport, protocol), bind=False))
        for name, t in case.together(ranks).items():
            reference.check(f"{protocol}: {name}", want[name], t)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("H, HV, K, V", [(2, 2, 8, 8), (1, 4, 8, 16), (3, 6, 16, 5), (2, 4, 64, 96), (1, 2, 33, 70)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_and_heads(rule, H, HV, K, V, dtype):
    """16-bit tensors round their results, and sums over the tokens cancel: the ranks may not be much further off than one of them alone."""
    offsets, lengths = [0, 50, 66, 80], [40, 0, 27, 13]
    case = Case(rule, offsets, lengths, H=H, HV=HV, K=K, V=V, dtype=dtype, gate="softplus", beta="logit", use_qk_l2norm_in_kernel=True)
    want, found = case.expected(), case.together(simulate(4, lambda transport: case.run(on_thread(transport, "p2p")))[0])
    case.lengths = [80]
    alone, = simulate(1, lambda transport: case.run(on_thread(transport, "p2p")))[0]
    for name, t in want.items():
        assert found[name].dtype == alone[name].dtype
        reference.check(name, t, found[name], max(reference.BOUNDS[found[name].dtype], 2 * reference.error(t, alone[name])))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("decay", [0.0, 2.0, 10.0, 60.0])
def test_strong_and_no_decay(rule, decay):
    for protocol in (parallel.p2p, parallel.recursive_doubling):
        case = Case(rule, [0, 30, 260], [64, 65, 66, 65], K=8, V=8, decay=decay, dtype=torch.float32)
        ranks, _ = simulate(4, lambda transport: case.run(on_thread(transport, protocol)))
        case.hold(case.together(ranks))


def test_resets():
    """A gate of -inf in the middle of a document cuts it exactly, wherever it lies."""
    for at in (0, 31, 32, 40, 64, 95):
        case = Case("gdn", [0, 96], [32, 32, 32], states=True)
        case.tensors["g"][:, at] = -torch.inf
        want = case.expected()
        ranks, _ = simulate(3, lambda transport: case.run(on_thread(transport, "p2p")))
        for name, t in case.together(ranks).items():
            if name == "dg":  # of a decay of 0 the logarithm has no gradient to speak of
                t, want[name] = (torch.cat((x[:, :at], x[:, at + 1:]), 1) for x in (t, want[name]))
            reference.check(name, want[name], t)


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["p2p", "recursive_doubling", "all_gather"])
def test_long_chain_hardly_decays(protocol):
    """64 chunks with beta 1 and g -1e-3 on 16 ranks: the maps are almost projections, their product must stay exact."""
    case = Case("gdn", [0, 4096], [256] * 16, H=1, HV=1, K=32, V=32, dtype=torch.float32)
    case.tensors["beta"].fill_(1)
    case.tensors["g"].fill_(-1e-3)
    ranks, _ = simulate(16, lambda transport: case.run(on_thread(transport, protocol)))
    case.hold(case.together(ranks))


def test_bits_do_not_depend_on_the_width():
    case = Case("gdn", [0, 10, 200], [50] * 4, dtype=torch.float32, K=16, V=16)
    found = []
    for protocol in (parallel.p2p, parallel.grouped(2), parallel.all_gather):
        ranks, _ = simulate(4, lambda transport: case.run(on_thread(transport, protocol)))
        found.append(case.together(ranks))
    for other in found[1:]:
        assert all(torch.equal(found[0][name], t) for name, t in other.items())


def test_states_of_documents():
    """Each state is where its document begins or ends, those of empty documents too; rows of other ranks are not read."""
    case = Case("gdn", *ODD)

    def spoiled(transport):
        plan = parallel.SequencePlan(*ODD, transport.rank)
        mine = [d for _, d in plan.begins] + list(plan.empty)
        other = Case("gdn", *ODD)
        rows = torch.tensor([d not in mine for d in range(case.N)])
        other.tensors["initial_state"][rows] = torch.nan
        found = other.run(on_thread(transport, "p2p"))
        ends = [d for _, d in plan.ends] + list(plan.empty)
        assert not found["ht"][[d for d in range(case.N) if d not in ends]].any()
        assert not found["dinitial_state"][rows].any()
        return found

    ranks, _ = simulate(6, spoiled)
    case.hold(case.together(ranks))


def test_gradient_of_the_final_state_alone():
    case = Case("gdn", [0, 30], [10, 10, 10])
    case.do.zero_()

    def work(transport):
        cp = on_thread(transport, "p2p")
        leaves = {name: case.local(name, t, cp.rank).clone().requires_grad_() for name, t in case.tensors.items()}
        o, ht = gdn.chunk_gated_delta_rule(**leaves, output_final_state=True, cp=cp)
        # The output is unused on all ranks, the final state means something on the last.
        gradients = torch.autograd.grad(ht, list(leaves.values()), case.dht)
        return {"o": o.detach(), "ht": ht.detach(), **{"d" + name: d for name, d in zip(leaves, gradients)}}

    case.hold(case.together(simulate(3, work)[0]))


def test_state_v_first():
    case = Case("gdn", [0, 5, 30], [10, 10, 10])

    def work(transport):
        cp = on_thread(transport, "p2p")
        given = {name: case.local(name, t, cp.rank) for name, t in case.tensors.items()}
        given["initial_state"] = given["initial_state"].mT
        o, ht = gdn.chunk_gated_delta_rule(**given, output_final_state=True, state_v_first=True, cp=cp.bind([0, 5, 30]))
        return {"o": o, "ht": ht.mT}

    found, want = case.together(simulate(3, work)[0]), case.expected()
    reference.check("o", want["o"], found["o"])
    reference.check("ht", want["ht"], found["ht"])


def test_messages():
    """Forward and backward one state for each edge that a document crosses, nothing else; with the gradient switched off, half of it."""
    state = 4 * 5 * 3
    for offsets, edges in (([0, 12], [0, 1]), ([0, 4, 8, 12], []), ([0, 4, 12], [1]), ([0, 1, 2, 8, 12], [0])):
        case = Case("gdn", offsets, [4, 4, 4])
        wires = case.check("p2p")
        assert sorted(wires.sent) == sorted([(r, r + 1, state) for r in edges] + [(r + 1, r, state) for r in edges])
        _, wires = simulate(3, lambda transport: case.run(on_thread(transport, "p2p"), grad=False))
        assert wires.sent == sorted((r, r + 1, state) for r in edges)
    for protocol in (*state_protocols(4), *head_protocols(4)):
        case = Case("gdn", [0, 3, 3, 6, 9, 12], [3, 0, 3, 6], H=12, HV=12)
        assert not case.check(protocol).sent


def test_traffic_is_counted():
    case = Case("gdn", [0, 12], [4, 4, 4])
    ranks, wires = simulate(3, lambda transport: case.run(on_thread(transport, "p2p")))
    for rank, found in enumerate(ranks):
        mine = [n for a, _, n in wires.sent if a == rank]
        assert (found["traffic"].messages, found["traffic"].bytes) == (len(mine), 8 * sum(mine))
        assert found["traffic"].collectives == 0


def several(transport, protocol, order):
    """Two calls live at once, of both rules where there are two; the gradients of `order` in turn."""
    cp = on_thread(transport, protocol)
    cases = [Case(RULES[i % len(RULES)], *layout_, seed=i) for i, layout_ in enumerate([([0, 5, 30], [10, 10, 10]), ([0, 18], [6, 6, 6])])]
    live = []
    for case in cases:
        rule = gdn.chunk_kda if case.rule == "kda" else gdn.chunk_gated_delta_rule
        leaves = {name: case.local(name, t, cp.rank).clone().requires_grad_() for name, t in case.tensors.items()}
        o, ht = rule(**leaves, output_final_state=True, cp=cp.bind(parallel.SequencePlan(case.offsets, case.lengths, cp.rank)))
        live.append((case, leaves, o, ht))
    results = [None, None]
    for i in order:
        case, leaves, o, ht = live[i]
        gradients = torch.autograd.grad((o, ht), list(leaves.values()), (case.local("do", case.do, cp.rank), case.dht))
        results[i] = {"o": o.detach(), "ht": ht.detach(), **{"d" + name: d for name, d in zip(leaves, gradients)}}
    assert not any(isinstance(value, torch.Tensor) for thing in (cp, cp.protocol) for value in vars(thing).values())
    return cases, results


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("protocol", ["p2p", "all_gather", "recursive_doubling"])
def test_several_live_calls(protocol, order):
    ranks, _ = simulate(3, several, protocol, order)
    for i in (0, 1):
        case = ranks[0][0][i]
        case.hold(case.together([results[i] for _, results in ranks]))


def test_checkpoint_keeps_what_came():
    """Checkpointed by this package a forward communicates once, by PyTorch twice; results are the same."""
    plain = Case("gdn", [0, 12], [4, 4, 4]).check("p2p")
    kept = Case("gdn", [0, 12], [4, 4, 4]).check("p2p", wrap=parallel.checkpoint)
    assert sorted(kept.sent) == sorted(plain.sent)
    again = Case("gdn", [0, 12], [4, 4, 4]).check("p2p", wrap=lambda f, *args: torch.utils.checkpoint.checkpoint(f, *args, use_reentrant=False))
    assert len(again.sent) == len(plain.sent) + 2


def test_checkpoint_backward_twice():
    def work(transport):
        cp = on_thread(transport, "p2p")
        x = torch.randn(1, 4, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(cp.rank)).requires_grad_()
        rule = lambda x: gdn.chunk_gated_delta_rule(x, x / x.norm(dim=-1, keepdim=True), x, cp=cp)[0]  # noqa: E731
        o = parallel.checkpoint(lambda x: rule(rule(x)), x)
        first, = torch.autograd.grad(o.sum(), x, retain_graph=True)
        second, = torch.autograd.grad(o.sum(), x)
        direct, = torch.autograd.grad(rule(rule(x)).sum(), x)
        assert torch.equal(first, second) and torch.equal(first, direct)

    simulate(3, work)


def test_autocast_does_not_round_states():
    case = Case("gdn", [0, 200], [50] * 4, dtype=torch.float32, K=16, V=16)

    def cast(transport, enabled):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            return case.run(on_thread(transport, "recursive_doubling"))

    plain, within = (case.together(simulate(4, cast, enabled)[0]) for enabled in (False, True))
    assert all(torch.equal(t, within[name]) for name, t in plain.items())


def test_no_gradient_of_a_gradient():
    def work(transport):
        x = torch.randn(1, 4, 2, 3, dtype=torch.float64, requires_grad=True)
        o, _ = gdn.chunk_gated_delta_rule(x, x, x, cp=on_thread(transport, "p2p"))
        gradient, = torch.autograd.grad(o.sum(), x, create_graph=True)
        with pytest.raises(RuntimeError):
            gradient.sum().backward()

    simulate(2, work)


@pytest.mark.parametrize("change, message", [
    (dict(T=5), "q has shape [1, 5, 2, 3], expected [1, 4, ...]"), (dict(B=2), "expected B=1 with 2 packed documents"),
    (dict(v=(1, 4, 3, 3)), "expected a multiple of H=2"), (dict(k=(1, 4, 2, 5)), "gdn_fwd: k has shape"),
    (dict(beta=(1, 4, 2, 3)), "expected [B, T, HV]: with a beta per value channel"), (dict(initial_state=(3, 2, 3, 3)), "for each of 2 documents"),
    (dict(initial_state=(2, 2, 4, 3)), "initial_state has shape"), (dict(cu_seqlens=torch.tensor([0, 4])), "cu_seqlens is given with cp"),
    (dict(cp="p2p"), "cp is str, expected a ContextParallel"), (dict(q=torch.zeros(1, 4, 2, 3, dtype=torch.int64)), "int64"),
    (dict(scale=0), "scale is 0"), (dict(A_log=(2,)), "A_log"),
])
@pytest.mark.parametrize("protocol", ["p2p", "ulysses"])
def test_refused_before_the_first_message(change, message, protocol):
    if protocol == "ulysses" and "beta" in change:
        pytest.skip("it spreads no states")
    change = dict(change)
    B, T = change.pop("B", 1), change.pop("T", 4)
    given = {name: torch.randn(B, T, 2, 3, dtype=torch.float64) for name in "qkv"}
    for name, value in change.items():
        given[name] = torch.randn(value, dtype=torch.float64) if isinstance(value, tuple) else value

    def work(transport):
        cp = on_thread(transport, protocol)
        with pytest.raises(ValueError) as caught:
            gdn.chunk_gated_delta_rule(**{"cp": cp.bind([0, 3, 8]), **given})
        assert message in str(caught.value)

    assert not simulate(2, work)[1].sent


def test_heads_that_do_not_divide():
    def work(transport):
        x = torch.randn(1, 4, 3, 3)
        with pytest.raises(ValueError, match="q has 3 heads and v 3, expected multiples of the Ulysses degree 2"):
            gdn.chunk_gated_delta_rule(x, x, x, cp=on_thread(transport, "ulysses"))

    assert not simulate(2, work)[1].sent


def test_a_beta_for_each_channel_with_ulysses():
    case = Case("gdn", [0, 5, 30], [10, 10, 10], H=3, HV=3, beta="channel")
    case.check("ulysses")


def test_contexts_of_fla():
    """``cp_context``: the same result from packed documents on equal shards; no states, and where it does not say enough it is refused."""
    case = Case("gdn", [0, 5, 12], [4, 4, 4], states=False, final=False)

    def work(transport):
        plan = parallel.SequencePlan([0, 5, 12], 3, transport.rank)
        context = parallel.FLACPContext(group=object(), plan=plan)
        context.bound = lambda q: on_thread(transport, "p2p").bind(plan)
        leaves = {name: case.local(name, t, transport.rank).clone().requires_grad_() for name, t in case.tensors.items()}
        o, none = gdn.chunk_gated_delta_rule(**leaves, cu_seqlens=torch.tensor([0, 99]), cp_context=context)
        assert none is None
        gradients = torch.autograd.grad(o, list(leaves.values()), case.local("do", case.do, transport.rank))
        for refused in (dict(output_final_state=True), dict(initial_state=torch.zeros(2, 4, 5, 3)), dict(cp=context)):
            with pytest.raises(ValueError, match="cp_context"):
                gdn.chunk_gated_delta_rule(**leaves, cp_context=context, **refused)
        return {"o": o.detach(), **{"d" + name: d for name, d in zip(leaves, gradients)}}

    case.hold(case.together(simulate(3, work)[0]))


# The layouts on which flash-linear-attention tests its context parallelism.
FLA = [(2, [3000, 4000, 3240]), (2, [5120, 5120]), (4, [7000, 3240]), (4, [10240]), (2, [1000, 1500, 2000, 2500, 1240, 1000, 1000]), (8, [65536])]


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("P, documents", FLA)
def test_layouts_of_fla(rule, P, documents):
    """Against one process: Gated DeltaNet with two value heads for each key head, Kimi Delta Attention with keys that are nearly parallel, the
    gate in the kernel, and amplitudes that differ from head to head."""
    T = sum(documents)
    offsets = [sum(documents[:i]) for i in range(len(documents) + 1)]
    H, D = (2, 64) if rule == "gdn" or T > 20000 else (4, 128)
    case = Case(rule, offsets, [T // P] * P, H=H, HV=4, K=D, V=D, dtype=torch.float32, gate="log" if rule == "gdn" else "bound", states=False,
                final=False, use_qk_l2norm_in_kernel=True)
    if rule == "kda":
        case.tensors["q"] += 1
        case.tensors["k"] = torch.randn_like(case.tensors["k"]) * 10 - 50
        case.tensors["A_log"] = torch.linspace(1, 8, 4).log()
    found = case.together(simulate(P, lambda transport: case.run(on_thread(transport, "auto")))[0])
    case.lengths = [T]
    alone = case.together(simulate(1, lambda transport: case.run(on_thread(transport, "auto")))[0])
    for name, t in alone.items():
        reference.check(name, t, found[name])
