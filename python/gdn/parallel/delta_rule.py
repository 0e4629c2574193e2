"""The delta rules on a sequence that lies on several ranks.

Each rank computes its fragments with the same operators as a single process; what changes is the state before its first fragment and the
gradient of the state after its last one, which the protocol brings. What a rank hands on it knows from a summary of its last (first)
fragment, before it has computed its outputs.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

from .. import _lib, library
from .heads import to_heads, to_tokens
from .protocols import apply_map
from .recompute import kept


class Family(NamedTuple):
    """The operators of a delta rule."""

    fwd: str
    bwd: str
    summary_fwd: str
    summary_bwd: str


GDN = Family("fwd", "bwd", "summary_fwd", "summary_bwd")
KDA = Family("kda_fwd", "kda_bwd", "kda_summary_fwd", "kda_summary_bwd")

# The arguments that have a row for each token.
TOKENS = ("q", "k", "v", "g", "beta")


@torch.compiler.disable
def run(family, cp, tensors, numbers, cu_seqlens=None, output_final_state=False, state_v_first=False):
    """o and final_state (None unless asked for) of a call under context parallelism.

    Args:
        family: GDN or KDA.
        cp: ContextParallel, or what its ``bind`` returns.
        tensors: by the name of the operator's argument, None where not given.
        numbers: likewise.
    """
    if not hasattr(cp, "bound"):
        raise ValueError(f"gdn.parallel: cp is {type(cp).__name__}, expected a ContextParallel or what its bind returns")
    if cu_seqlens is not None:
        raise ValueError("gdn.parallel: cu_seqlens is given with cp; where documents lie is for the plan to say, as in cp.bind(plan)")
    if state_v_first and tensors["initial_state"] is not None:
        tensors = {**tensors, "initial_state": tensors["initial_state"].transpose(-1, -2)}
    o, final_state = _run(family, cp.bound(tensors["q"]), tensors, numbers, output_final_state)
    return o, final_state.transpose(-1, -2) if state_v_first and output_final_state else final_state


def _run(family, bound, tensors, numbers, output_final_state):
    plan = bound.plan
    _validate(family, bound, tensors, numbers)
    if bound.degree > 1 and plan.crosses:
        return _by_heads(family, bound, tensors, numbers, output_final_state)
    call = _Call(family, bound, numbers, output_final_state, [name for name, t in tensors.items() if t is not None])
    given = [tensors[name] for name in call.names]
    call.save = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    o, final_state = _Rule.apply(call, *given)
    return o, final_state if output_final_state else None


def _validate(family, bound, tensors, numbers):
    """Everything that can be wrong is found here, before the first message."""
    plan, (q, v) = bound.plan, (tensors["q"], tensors["v"])
    for name, t in tensors.items():
        if t is None or name not in TOKENS:
            continue
        if t.dim() < 3 or t.shape[0] != q.shape[0] or t.shape[1] != plan.tokens:
            raise ValueError(f"gdn.parallel: {name} has shape {list(t.shape)}, expected [{q.shape[0]}, {plan.tokens}, ...]: rank {plan.rank} "
                             f"of the plan holds {plan.tokens} tokens")
    if plan.num_documents != 1 and q.shape[0] != 1:
        raise ValueError(f"gdn.parallel: q has shape {list(q.shape)}, expected B=1 with {plan.num_documents} packed documents")
    h0, states = tensors["initial_state"], plan.num_documents if plan.num_documents != 1 else q.shape[0]
    if h0 is not None and (h0.dim() != 4 or h0.shape[0] != states or not h0.is_floating_point()):
        raise ValueError(f"gdn.parallel: initial_state has shape {list(h0.shape)} and is {h0.dtype}, expected a floating state for each of "
                         f"{states} documents, on all ranks")
    beta = tensors["beta"]
    if plan.rows(bound.degree).crosses and beta is not None and beta.dim() != 3:
        raise ValueError(f"gdn.parallel: beta has shape {list(beta.shape)}, expected [B, T, HV]: with a beta per value channel the state has no "
                         "map of K x K; use ulysses")
    # The library itself looks at everything else, in a call without tokens that it does not run.
    given = {name: t[:, :0] if name in TOKENS and t is not None else t for name, t in tensors.items()}
    if h0 is not None:
        given["initial_state"] = h0[:q.shape[0]]
    row = _lib.OPS[family.fwd].row
    views = {name: library.view(t) for name, t in {**given, "o": given["v"]}.items() if t is not None}
    _lib.OPS[family.fwd].supports([views.get(t["name"]) for t in row["tensors"]], [numbers.get(n["name"], 0) for n in row["numbers"]])
    if bound.degree > 1 and (q.shape[2] % bound.degree or v.shape[2] % bound.degree):
        raise ValueError(f"gdn.parallel: q has {q.shape[2]} heads and v {v.shape[2]}, expected multiples of the Ulysses degree {bound.degree}")


class _Call:
    """What belongs to one call beside its tensors."""

    def __init__(self, family, bound, numbers, output_final_state, names):
        self.family, self.bound, self.numbers, self.output_final_state, self.names = family, bound, numbers, output_final_state, names
        plan = bound.plan
        self.sending = None  # the exchange of a forward under way
        self.save = False  # whether a backward will follow
        # A single document needs no offsets: each batch row is one.
        self.cu_seqlens = None if plan.num_documents == 1 else plan.cu_seqlens

    def exchange(self, reverse, q, v):
        like = q.new_empty(0, dtype=accumulator(q))
        shape = (q.shape[0], v.shape[2], q.shape[3], v.shape[3])
        return self.bound.protocol.exchange(self.bound.transport, self.bound.plan, reverse, like, shape)

    def fragment_states(self, outer, received, places, at, dtype):
        """[n, HV, K, V] for the operator: the documents' states at each (fragment, document), and what was received at fragment `at`; None
        where all are zero."""
        plan = self.bound.plan
        outer = outer if places else None
        if plan.num_documents == 1 or (outer is None and received is None):
            return outer if received is None else received
        like = outer if received is None else received
        made = like.new_zeros(plan.num_sequences, *like.shape[1:], dtype=dtype)
        for fragment, document in places if outer is not None else ():
            made[fragment] = outer[document]
        if received is not None:
            made[at] = received[0]
        return made

    def document_states(self, fragments, places, passed, like, shape):
        """[N, HV, K, V] of this rank's part: the fragments' states at each (fragment, document), those of empty documents as they came in,
        zeros elsewhere."""
        plan = self.bound.plan
        if plan.num_documents == 1 and places:
            return fragments
        made = like.new_zeros(shape, dtype=accumulator(like))
        for fragment, document in places:
            made[document] = fragments[fragment]
        if passed is not None:
            rows = slice(None) if plan.num_documents == 1 and plan.empty else plan.empty
            made[rows] = passed[rows].to(made.dtype)
        return made


class _Rule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, *given):
        tensors, plan, numbers = dict(zip(call.names, given)), call.bound.plan, call.numbers
        q, v, h0 = tensors["q"], tensors["v"], tensors.get("initial_state")
        received = kept.get(lambda: _Rule.receive(call, tensors)) if plan.crosses else None
        states = call.fragment_states(h0, received, plan.begins, 0, accumulator(q))
        operands = {**tensors, "initial_state": states, "cu_seqlens": call.cu_seqlens}
        final = call.output_final_state and bool(plan.ends)
        made = invoke(call.family.fwd, **operands, **numbers, output_final_state=final, save=call.save)
        if call.output_final_state:
            shape = (plan.num_documents if plan.num_documents != 1 else q.shape[0], v.shape[2], q.shape[3], v.shape[3])
            final = call.document_states(made["final_state"], plan.ends, h0, q, shape)
        else:
            final = q.new_empty(0)
            ctx.mark_non_differentiable(final)
        if call.sending is not None:
            call.sending.close()
            call.sending = None
        if call.save:
            ctx.save_for_backward(*given, states, made["tape"])
            ctx.call, ctx.state_shape = call, final.shape
            ctx.set_materialize_grads(False)
        return made["o"], final

    @staticmethod
    def receive(call, tensors):
        """The state before the first fragment, by the protocol; the sends are left under way."""
        q, v, plan = tensors["q"], tensors["v"], call.bound.plan
        exchange = call.exchange(False, q, v)
        packed = None
        if exchange.needs_map:
            window = {name: t[:, plan.tail] if name in TOKENS else t for name, t in tensors.items()}
            packed = invoke(call.family.summary_fwd, **window, **call.numbers)["map"]
            if not exchange.needs_matrix:  # the document begins here
                h0 = tensors.get("initial_state")
                packed = packed[..., :v.shape[3]] if h0 is None else apply_map(packed, _row(h0, plan.begins[-1][1], plan).to(packed.dtype))
        received = exchange.state(packed)
        call.sending = exchange
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dfinal):
        call = ctx.call
        plan, numbers, names = call.bound.plan, call.numbers, call.names
        *given, states, tape = ctx.saved_tensors
        tensors = dict(zip(names, given))
        q, v = tensors["q"], tensors["v"]
        if do is None:
            do = v.new_zeros(()).expand(*v.shape)
        if dfinal is not None:
            dfinal = dfinal.to(accumulator(q))
        exchange, received = None, None
        if plan.crosses:
            exchange = call.exchange(True, q, v)
            packed = None
            if exchange.needs_map:
                window = {name: t[:, plan.head] if name in TOKENS else t for name, t in tensors.items()}
                packed = invoke(call.family.summary_bwd, **window, **numbers, dout=do[:, plan.head])["map"]
                if not exchange.needs_matrix:  # the document ends here
                    packed = packed[..., :v.shape[3]] if dfinal is None else apply_map(packed, _row(dfinal, plan.ends[0][1], plan))
            received = exchange.state(packed)
        dht = call.fragment_states(dfinal, received, plan.ends, -1, accumulator(q))
        operands = {**tensors, "initial_state": states, "cu_seqlens": call.cu_seqlens}
        made = invoke(call.family.bwd, **operands, **numbers, tape=tape, dout=do, dht=dht)
        gradients = []
        for name, t, needed in zip(names, given, ctx.needs_input_grad[1:]):
            if not needed:
                gradients.append(None)
            elif name == "initial_state":
                inner = made["dh0"] if plan.begins else None
                gradients.append(call.document_states(inner, plan.begins, dfinal, q, t.shape).to(t.dtype))
            else:
                gradients.append(made["d" + name].to(t.dtype))
        if exchange is not None:
            exchange.close()
        return (None, *gradients)


def _row(states, document, plan):
    """The state of a document with its batch dimension; of all batch rows where there is but one document."""
    return states if plan.num_documents == 1 else states[document:document + 1]


def _by_heads(family, bound, tensors, numbers, output_final_state):
    """Ulysses: the row's tokens for some of the heads, and between rows, if there are several, a state protocol."""
    row, inner, plan = bound.row, bound.inner, bound.plan
    tokens = [name for name in TOKENS if tensors[name] is not None]
    members = [plan.at(plan.rank - row.rank + member) for member in range(row.size)]
    lengths = [tuple(member.tokens for member in members)] * len(tokens)
    given = [tensors[name] for name in tokens]
    h0, single = tensors["initial_state"], plan.num_documents == 1
    begins, ends = ([_states(member, which, tensors["q"].shape[0]) for member in members] for which in ("begins", "ends"))
    if h0 is not None:
        given.append(_take(h0, begins[row.rank]).unsqueeze(0))
        lengths.append(tuple(map(len, begins)))
    swapped = to_heads(row, lengths, given)
    share = {name: _share(t, row) if name in ("A_log", "dt_bias") and t is not None else None for name, t in tensors.items()}
    share.update(zip(tokens, swapped))
    if h0 is not None:
        share["initial_state"] = _put(swapped[-1][0], sum(begins, []), h0.shape[0])
    o, final_state = _run(family, inner, share, numbers, output_final_state)
    results, lengths = [o], lengths[:1]
    if output_final_state:
        results.append(_take(final_state, sum(ends, [])).unsqueeze(0))
        lengths.append(tuple(map(len, ends)))
    back = to_tokens(row, lengths, results)
    states = plan.num_documents if not single else tensors["q"].shape[0]
    return back[0], _put(back[1][0], ends[row.rank], states) if output_final_state else None


def _states(plan, which, batch):
    """The rows of the documents' states that enter (leave) on a rank, in order."""
    places = sorted([document for _, document in getattr(plan, which)] + list(plan.empty))
    return list(range(batch)) if places and plan.num_documents == 1 else places


def _take(states, rows):
    return states.index_select(0, torch.tensor(rows, dtype=torch.int64, device=states.device))


def _put(states, rows, count):
    made = states.new_zeros(count, *states.shape[1:])
    return made.index_copy(0, torch.tensor(rows, dtype=torch.int64, device=states.device), states)


def _share(t, row):
    n = t.shape[0] // row.size
    return t[row.rank * n:(row.rank + 1) * n]


def accumulator(t):
    """The dtype of states."""
    return torch.float64 if t.dtype == torch.float64 else torch.float32


@lru_cache(maxsize=None)
def _signature(name):
    row = _lib.OPS[name].row
    parameters = [(t["name"], None) for t in library.inputs(row)] + [(n["name"], 0.0 if n["float"] else 0) for n in row["numbers"]]
    return library.operator(name), parameters + [(want, False) for want in library.wants(row)], [t["name"] for t in library.outputs(row)]


def invoke(name, **arguments):
    """Calls an operator of the table; it takes those of the arguments that it has. Returns {output: tensor}."""
    op, parameters, results = _signature(name)
    made = op(*[arguments.get(parameter, default) for parameter, default in parameters])
    return dict(zip(results, made if len(results) > 1 else (made,)))
