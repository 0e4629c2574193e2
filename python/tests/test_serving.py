"""Decoding from and to a pool of states."""

import inspect

import numpy as np
import pytest
import torch
from torch.library import opcheck

import gdn
import gdn.array
import reference
from gdn import library
from gdn.serving import fused_recurrent_gated_delta_rule_fwd as GDN
from gdn.serving import fused_recurrent_kda_fwd as KDA

UNUSED = 1e30
ROWS = ("q", "k", "v", "g", "beta")  # what has a row for each token
both = pytest.mark.parametrize("function", [GDN, KDA])


def tokens(function, B=3, T=1, H=1, HV=2, K=32, V=32, dtype=torch.float32):
    x = dict(q=torch.randn(B, T, H, K), k=torch.nn.functional.normalize(torch.randn(B, T, H, K), dim=-1), v=torch.randn(B, T, HV, V),
             g=-torch.rand(B, T, HV, *([K] if function is KDA else [])), beta=torch.rand(B, T, HV))
    return {name: t.to(dtype) if name in "qkv" else t for name, t in x.items()}


def pool_of(P, x, used, dtype=torch.float32, v_first=False):
    """States in the used slots, and what shows when it is touched in the others."""
    HV, K, V = x["v"].shape[2], x["q"].shape[3], x["v"].shape[3]
    pool = torch.full((P, HV, V, K) if v_first else (P, HV, K, V), UNUSED).to(dtype)
    pool[used] = torch.randn(len(used), *pool.shape[1:]).to(dtype)
    return pool


def expected(x, state, **options):
    """o and the state after each token of one sequence, in float64, by the tests' reference; x has B = 1."""
    outputs, states = [], []
    for t in range(x["q"].shape[1]):
        one = {name: value[:, t:t + 1] if name in ROWS and value is not None else value for name, value in x.items()}
        o, state = reference.delta_rule(**one, initial_state=state, **options)
        outputs.append(o)
        states.append(state)
    return torch.cat(outputs, 1) if outputs else None, states


def sequence(x, n, rows=None):
    """Sequence n of a batch, or the rows of a packed one."""
    return {name: (t[n:n + 1] if rows is None else t[:, rows]) if name in ROWS and t is not None else t for name, t in x.items()}


def check(function, x, pool, slots, accepted=None, cu=None, **options):
    """Runs the call in place and holds o, every slot that it stores to and all others to what they should be."""
    before = pool.clone()
    offsets = None if cu is None else torch.tensor(cu)
    o, final = function(**x, initial_state=pool, ssm_state_indices=slots, num_accepted_tokens=accepted, cu_seqlens=offsets, **options)
    assert final is pool and o.shape == x["v"].shape and o.dtype == x["v"].dtype
    table = slots if slots.dim() == 2 else slots[:, None]
    stored = set()
    for n in range(table.shape[0]):
        rows = None if cu is None else slice(cu[n], cu[n + 1])
        start = int(table[n, 0 if accepted is None else int(accepted[n]) - 1])
        got = o[n:n + 1] if cu is None else o[:, rows]
        if start < 0:
            assert (got == 0).all()
            continue
        want, states = expected(sequence(x, n, rows), before[start:start + 1].double(), **options)
        if want is not None:
            reference.check("o", want, got)
        last = {int(table[n, t]): states[t] for t in range(len(states)) if table[n, t] >= 0}
        for slot, state in last.items():
            reference.check("state", state[0], pool[slot])
        stored |= set(last)
    others = [slot for slot in range(len(pool)) if slot not in stored]
    assert torch.equal(pool[others].view(torch.uint8), before[others].view(torch.uint8))
    return o


@both
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("K, V", [(32, 32), (64, 96), (20, 7), (1, 33)])
def test_one_token(function, K, V, dtype, v_first, index):
    x = tokens(function, B=4, H=2, HV=4, K=K, V=V, dtype=dtype)
    check(function, x, pool_of(9, x, [7, 0, 3], dtype, v_first), torch.tensor([7, -1, 0, 3], dtype=index), state_v_first=v_first)


@both
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_speculative(function, dtype, v_first):
    x = tokens(function, B=3, T=3, HV=2, K=32, V=64)
    slots = torch.tensor([[1, 2, 1, 99, 5], [4, -7, 4, 8, 99], [11, 0, 12, 5, -1]])  # 0 and 2 go on from slot 5, which neither stores to
    check(function, x, pool_of(13, x, [5, 4, 11], dtype, v_first), slots, torch.tensor([5, 1, 4]), state_v_first=v_first)


@both
def test_packed_sequences(function):
    x = tokens(function, B=1, T=9)
    for name, t in x.items():
        t[:, 7:] = float("nan")
    slots = torch.tensor([[3, 1, 4, 0], [5, 5, 5, 5], [-2, 9, 9, 9], [7, 7, 6, -3], [-1, -1, -1, -1]], dtype=torch.int32)
    pool = pool_of(12, x, [0, 5, 6])
    o = check(function, x, pool, slots, torch.tensor([4, 2, 1, 3, 1]), cu=[0, 4, 4, 5, 7, 7])
    assert (o[:, 7:] == 0).all()


@both
@pytest.mark.parametrize("options", [
    dict(use_qk_l2norm_in_kernel=True, scale=0.3),
    dict(use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True),
    dict(use_gate_in_kernel=True),
    dict(use_gate_in_kernel=True, lower_bound=-5.0),
])
def test_options(function, options):
    x = tokens(function, T=2, H=2, HV=4, K=24, V=40)
    if options.get("use_gate_in_kernel"):
        x.update(g=torch.randn_like(x["g"]), A_log=torch.rand(1, 4, 1), dt_bias=torch.randn(x["g"].shape[2:].numel()))
    if options.get("lower_bound"):
        if function is GDN:
            return  # it has no such gate
        x["A_log"] = None
    if options.get("use_beta_sigmoid_in_kernel"):
        x["beta"] = torch.randn(3, 2, 4, 40)
    check(function, x, pool_of(7, x, [6, 2, 4]), torch.tensor([[6, 5], [2, 0], [4, 4]]), **options)


@both
def test_no_gate_and_no_beta(function):
    x = tokens(function, T=2)
    x.update(g=None, beta=None)
    got, _ = function(**x, initial_state=torch.ones(3, 2, 32, 32))
    x.update(g=torch.zeros(tokens(function, T=2)["g"].shape), beta=torch.ones(3, 2, 2))
    assert torch.equal(got, function(**x, initial_state=torch.ones(3, 2, 32, 32))[0])


# Sizes and data of the decode tests of fla: (B, H, D, scale, gate normaliser, l2norm, gate, safe)
@pytest.mark.parametrize("B, H, D, scale, norm, l2, gate, safe, dtype", [
    (16, 16, 128, .1, 1, True, False, False, torch.bfloat16), (32, 8, 64, 1, 1, False, False, False, torch.float16),
    (7, 32, 128, .5, .5, True, False, False, torch.bfloat16), (16, 16, 128, .1, 1, True, True, False, torch.bfloat16),
    (32, 8, 64, 1, 1, False, True, False, torch.float16), (7, 32, 128, .5, .5, True, True, True, torch.bfloat16)])
def test_paged_decode(B, H, D, scale, norm, l2, gate, safe, dtype):
    x = tokens(KDA, B=B, H=H, HV=H, K=D, V=D, dtype=dtype)
    x.update(beta=torch.randn(B, 1, H).sigmoid(), g=torch.randn_like(x["g"]) if gate else torch.nn.functional.logsigmoid(torch.randn_like(x["g"])) / norm)
    options = dict(scale=scale, use_qk_l2norm_in_kernel=l2, use_gate_in_kernel=gate)
    if gate:
        x.update(A_log=torch.rand(H).mul(15).add(1).log(), dt_bias=torch.randn(H * D))
        options.update(lower_bound=-5.0 if safe else None)
    slots = torch.randperm(3 * B)[:B].to(torch.int32)
    check(KDA, x, pool_of(3 * B, x, slots.long()), slots, **options)


@both
@pytest.mark.parametrize("v_first", [False, True])
def test_several_tokens_are_as_many_calls(function, v_first):
    x = tokens(function, B=2, T=4, K=64, V=64)
    slots = torch.tensor([[3, 1, 4, 0], [5, 9, 2, 6]])
    whole = pool_of(10, x, [3, 5], v_first=v_first)
    parts = whole.clone()
    o, _ = function(**x, initial_state=whole, ssm_state_indices=slots, state_v_first=v_first)
    for t in range(4):
        one = {name: value[:, t:t + 1] for name, value in x.items()}
        # The sequence stands in the slot of its last accepted token and stores in that of the next.
        table = torch.stack([slots[:, t], slots[:, t - 1] if t else slots[:, 0]], 1)
        part, _ = function(**one, initial_state=parts, ssm_state_indices=table, num_accepted_tokens=torch.tensor([2, 2]), state_v_first=v_first)
        assert torch.equal(part, o[:, t:t + 1])
    assert torch.equal(whole, parts)


@both
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_not_in_place(function, v_first, dtype):
    x = tokens(function, B=3, T=4, HV=2, K=32, V=48)
    pool = pool_of(6, x, [4, 1], dtype, v_first)
    before, slots = pool.clone(), torch.tensor([[4, 9, 9, 9], [-1, 0, 0, 0], [4, 4, 4, 4]])
    o, final = function(**x, initial_state=pool, ssm_state_indices=slots, inplace_final_state=False, output_final_state=True, state_v_first=v_first)
    assert torch.equal(pool, before) and final.dtype == torch.float32 and final.shape == (3, *pool.shape[1:])
    for n in (0, 2):
        want, states = expected(sequence(x, n), before[4:5].double(), state_v_first=v_first)
        reference.check("o", want, o[n:n + 1])
        reference.check("final_state", states[-1][0], final[n])
    assert (o[1] == 0).all() and (final[1] == 0).all()
    assert function(**x, initial_state=pool, ssm_state_indices=slots, inplace_final_state=False, state_v_first=v_first)[1] is None


@both
@pytest.mark.parametrize("v_first", [False, True])
def test_without_indices_or_states(function, v_first):
    x = tokens(function, T=3)
    pool = pool_of(3, x, [0, 1, 2], v_first=v_first)
    first = pool.clone()
    o, final = function(**x, initial_state=pool, state_v_first=v_first)
    again, other = function(**x, initial_state=first, state_v_first=v_first, inplace_final_state=False, output_final_state=True)
    assert final is pool and torch.equal(o, again) and torch.equal(other, pool)
    none, last = function(**x, inplace_final_state=False, output_final_state=True, state_v_first=v_first)
    zeros, want = function(**x, initial_state=torch.zeros_like(first), inplace_final_state=False, output_final_state=True, state_v_first=v_first)
    assert torch.equal(none, zeros) and torch.equal(last, want)
    none, last = function(**{n: t.reshape(1, 9, *t.shape[2:]) for n, t in x.items()}, cu_seqlens=torch.tensor([0, 3, 6, 9]), inplace_final_state=False,
                          output_final_state=True, state_v_first=v_first)
    assert torch.equal(none.reshape(zeros.shape), zeros) and torch.equal(last, want)


@both
@pytest.mark.parametrize("B, T, K, V", [(2, 1, 64, 96), (2, 3, 20, 33), (9, 1, 128, 128), (9, 3, 128, 128)])  # the last ones past the caches
def test_same_bits_as_the_recurrent_form(function, B, T, K, V):
    x = tokens(function, B=B, T=T, HV=8, K=K, V=V)
    pool = torch.randn(B + 3, 8, K, V)
    slots = torch.randperm(B + 3)[:B]
    recurrent = gdn.fused_recurrent_kda if function is KDA else gdn.fused_recurrent_gated_delta_rule
    want, last = recurrent(**x, initial_state=pool[slots], output_final_state=True)
    turned, state = recurrent(**x, initial_state=pool[slots].transpose(2, 3).contiguous(), output_final_state=True, state_v_first=True)
    assert torch.equal(turned, want) and torch.equal(state.transpose(2, 3), last)
    table = slots[:, None].expand(B, T)
    o, final = function(**x, initial_state=pool, ssm_state_indices=table, inplace_final_state=False, output_final_state=True)
    assert torch.equal(o, want) and torch.equal(final, last)
    o, _ = function(**x, initial_state=pool, ssm_state_indices=table)
    assert torch.equal(o, want) and torch.equal(pool[slots], last)


@both
def test_empty_sequences(function):
    x = tokens(function, B=1, T=0)
    pool = pool_of(3, x, [1])
    o, final = function(**x, initial_state=pool, cu_seqlens=torch.tensor([0, 0, 0]), ssm_state_indices=torch.tensor([1, -1]),
                        inplace_final_state=False, output_final_state=True)
    assert o.shape == (1, 0, 2, 32) and torch.equal(final[0], pool[1]) and (final[1] == 0).all()
    o, _ = function(**x, initial_state=pool, cu_seqlens=torch.tensor([0, 0, 0]), ssm_state_indices=torch.tensor([77, 77]))
    assert o.shape == (1, 0, 2, 32)


@both
def test_out(function):
    x = tokens(function)
    out, pool = torch.empty(3, 1, 2, 32), pool_of(3, x, [0, 1, 2])
    want, _ = function(**x, initial_state=pool.clone())
    o, _ = function(**x, initial_state=pool.clone(), out=out)
    assert o is out and torch.equal(o, want)
    before = pool.clone()
    for wrong in (torch.empty(3, 1, 2, 31), torch.empty(3, 1, 2, 32, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"out is \[3, 1, 2, 3[12]\] of torch.float(32|64), expected \[3, 1, 2, 32\] of torch.float32"):
            function(**x, initial_state=pool, out=wrong)
    assert torch.equal(pool, before)


@both
def test_strided_pool(function):
    """A slot of a larger record, heads apart in memory, and states that are not compact: all work, and what lies between stays."""
    x = tokens(function, B=2, T=2, HV=2, K=32, V=32)
    slots = torch.tensor([[3, 0], [1, 4]])
    for make in (lambda: torch.full((5, 3, 2, 32, 32), UNUSED)[:, 1], lambda: torch.full((2, 5, 32, 32), UNUSED).transpose(0, 1),
                 lambda: torch.full((5, 2, 32, 40), UNUSED)[..., 3:35], lambda: torch.full((5, 2, 32, 64), UNUSED)[..., ::2],
                 lambda: torch.full((5, 2, 32, 32), UNUSED).transpose(2, 3)):
        pool = make()
        base = pool._base
        pool.copy_(pool_of(5, x, [3, 1]))
        outside = base.clone().as_strided(pool.shape, pool.stride(), pool.storage_offset()).zero_()._base
        compact = pool.contiguous().clone()
        o, _ = function(**x, initial_state=pool, ssm_state_indices=slots)
        again, _ = function(**x, initial_state=compact, ssm_state_indices=slots)
        assert torch.equal(o, again) and torch.equal(pool, compact)
        pool.zero_()
        assert torch.equal(base, outside)


def refused(function, x, pool, match, error=ValueError, **options):
    before = pool.clone()
    with pytest.raises(error, match=match):
        function(**x, initial_state=pool, **options)
    assert torch.equal(pool, before)


@both
def test_wrong_indices_change_nothing(function):
    x = tokens(function, T=2)
    pool = pool_of(5, x, [0, 1, 2, 3, 4])
    right = torch.tensor([[0, 1], [2, 2], [3, 4]])

    def table(row, column, value, dtype=torch.int64):
        changed = right.clone().to(dtype)
        changed[row, column] = value
        return changed

    def no(match, slots, accepted=None, **more):
        refused(function, x, pool, match, ssm_state_indices=slots, num_accepted_tokens=accepted, **more)

    no(r"ssm_state_indices\[2, 1\] is 5, expected less than P=5, or a negative number", table(2, 1, 5))
    no(r"ssm_state_indices\[2, 0\] is 2147483647, expected less than P=5", table(2, 0, 2**31 - 1, torch.int32))
    no(r"ssm_state_indices\[0, 0\] is 9223372036854775807, expected less than P=5", table(0, 0, 2**63 - 1))
    no(r"ssm_state_indices\[2, 1\] is 0, a slot that sequence 0 uses too", table(2, 1, 0))
    no(r"ssm_state_indices\[1, 0\] is 1, a slot that sequence 0 uses too", table(1, 0, 1))
    no(r"num_accepted_tokens\[1\] is 0, expected 1 to R=2", right, torch.tensor([1, 0, 1]))
    no(r"num_accepted_tokens\[2\] is 3, expected 1 to R=2", right, torch.tensor([1, 1, 3], dtype=torch.int32))
    no(r"num_accepted_tokens is given without ssm_state_indices", None, torch.tensor([1, 1, 1]))
    no(r"ssm_state_indices has shape \[3 1\], expected a slot for each of T=2 tokens", right[:, :1])
    no(r"ssm_state_indices has shape \[3\], expected a slot for each of T=2 tokens", right[:, 0])
    no(r"ssm_state_indices has dtype float32, expected int32 or int64", right.float())
    no(r"ssm_state_indices has shape \[2 2\], expected \[N R\] with N=3", right[:2])
    no(r"pool has P=5, expected N=3 without ssm_state_indices", None)
    packed = {n: t.reshape(1, 6, *t.shape[2:]) for n, t in x.items()}
    refused(function, packed, pool, r"sequence 0 has 4 tokens, expected at most R=2", ssm_state_indices=right, cu_seqlens=torch.tensor([0, 4, 5, 6]))
    # Two may go on from one slot as long as neither stores there.
    function(**x, initial_state=pool, ssm_state_indices=torch.tensor([[0, 1, 4], [2, 2, 4], [3, -1, 4]]), num_accepted_tokens=torch.tensor([3, 3, 1]))


@both
def test_wrong_tensors_change_nothing(function):
    x = tokens(function)
    pool = pool_of(3, x, [0, 1, 2])
    refused(function, {**x, "g": x["g"][0]}, pool, "g has shape")
    refused(function, x, pool[:, :1], r"pool has shape \[3 1 32 32\], expected \[P HV K V\] with HV=2")
    refused(function, x, pool.int(), "pool has dtype int32")
    refused(function, x, pool.double(), "pool has dtype float64, expected float32, bfloat16 or float16, as q is not float64")
    refused(function, x, pool[:1].expand(3, 2, 32, 32), "elements do not overlap")
    refused(function, x, pool, "backend is 'npu'", backend="npu")
    refused(function, x, pool, "scale is 0", scale=0)
    refused(function, x, pool, "gate is 1 and A_log is NULL", use_gate_in_kernel=True)
    refused(function, x, pool, "neg_eigval is 1 and beta_sigmoid is 0", allow_neg_eigval=True)
    with pytest.raises(ValueError, match="inplace_final_state is set and initial_state is None"):
        function(**x)
    with pytest.raises(TypeError):
        function(**x, initial_state=pool, no_such_keyword=1)


def test_overlap_of_pool_and_input():
    x = tokens(GDN, B=1, HV=1, K=32, V=32)
    memory = torch.randn(1, 1, 32, 32)
    refused(GDN, {**x, "v": memory[:, :, 0].unsqueeze(2).expand(1, 1, 1, 32)}, memory, "pool overlaps v")


@both
def test_signature(function):
    names = list(inspect.signature(function).parameters)
    order = ("q k v g beta A_log dt_bias initial_state scale output_final_state inplace_final_state state_v_first cu_seqlens ssm_state_indices "
             "num_accepted_tokens use_qk_l2norm_in_kernel use_gate_in_kernel use_beta_sigmoid_in_kernel allow_neg_eigval lower_bound out").split()
    if function is GDN:
        order.remove("lower_bound")
    assert names[:len(order)] == order
    assert getattr(gdn, function.__name__) is function and function.__name__ in gdn.__all__


# What PyTorch asks of an operator that updates a tensor

def operands(in_place=True, T=2, final_state=False, grad=False):
    x = tokens(KDA, B=2, T=T, K=8, V=6)
    pool = torch.randn(5, 2, 8, 6)
    tensors = [x["q"].requires_grad_(grad), x["k"], x["v"], x["g"], x["beta"], None, None, pool, torch.tensor([[3, 0], [1, 2]]), torch.tensor([1, 2]), None]
    return (*tensors, 0.3, False, False, 0.0, False, False, False, in_place, final_state)


@pytest.mark.parametrize("in_place, final_state", [(True, False), (True, True), (False, True)])
def test_opcheck(in_place, final_state):
    opcheck(library.operator("decode"), operands(in_place, final_state=final_state))


def test_schema():
    schema = library.operator("decode")._schema
    assert [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write] == ["pool"] and schema.is_mutable


@both
def test_compile_fullgraph(function):
    compiled = torch.compile(function, fullgraph=True)
    for T in (1, 2, 3):
        x = tokens(function, T=T)
        pool = pool_of(7, x, [1, 3, 5])
        slots = torch.tensor([[1, 0, 1], [3, 2, 3], [5, 5, 5]])
        other = pool.clone()
        o, final = compiled(**x, initial_state=pool, ssm_state_indices=slots)
        want, _ = function(**x, initial_state=other, ssm_state_indices=slots)
        assert torch.equal(o, want) and torch.equal(pool, other) and final is pool


def test_functionalization_orders_reads_and_writes():
    """A graph that reads the pool before and after the call sees what eager code does."""
    x = tokens(GDN, B=1)

    def step(pool):
        before = pool.sum()
        o, _ = GDN(**x, initial_state=pool)
        p2, _ = GDN(**x, initial_state=pool)
        return before, pool.sum(), o, p2

    pool = torch.randn(1, 2, 32, 32)
    other = pool.clone()
    for got, want in zip(torch.compile(step, fullgraph=True)(pool), step(other)):
        torch.testing.assert_close(got, want)
    assert torch.equal(pool, other)


@both
def test_versions_are_counted(function):
    x = tokens(function)
    pool = pool_of(3, x, [0, 1, 2])
    w = torch.ones((), requires_grad=True)
    y = (w * pool).sum()
    version = pool._version
    function(**x, initial_state=pool)
    assert pool._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    with torch.inference_mode():
        version = pool._version
        function(**x, initial_state=pool)
        assert pool._version > version
        function(**x, initial_state=pool.clone())  # an inference tensor has no version


@both
def test_no_gradient(function):
    x = tokens(function)
    x["q"].requires_grad_()
    pool = pool_of(3, x, [0, 1, 2])
    o, final = function(**x, initial_state=pool)
    assert final is pool and not pool.requires_grad
    with pytest.raises(RuntimeError, match="is for inference and has no gradient"):
        o.sum().backward()
    with torch.no_grad():
        assert not function(**x, initial_state=pool)[0].requires_grad
    with pytest.raises(RuntimeError, match="updates pool in place, which requires its gradient"):
        function(**x, initial_state=pool.clone().requires_grad_())


@both
def test_threads_do_not_change_bits(function):
    x = tokens(function, B=5, T=2, H=2, HV=6, K=64, V=32)
    slots = torch.arange(10).view(5, 2)
    pool = pool_of(12, x, list(range(10)))
    threads, results = gdn.get_num_threads(), []
    try:
        for n in (1, 2, 3):
            gdn.set_num_threads(n)
            copy = pool.clone()
            results.append((function(**x, initial_state=copy, ssm_state_indices=slots)[0], copy))
    finally:
        gdn.set_num_threads(threads)
    for o, copy in results[1:]:
        assert torch.equal(o, results[0][0]) and torch.equal(copy, results[0][1])


def test_arrays():
    """The operator for arrays updates the array itself, and refuses one that is read-only."""
    x = tokens(KDA, B=2, T=2)
    pool, slots = torch.randn(4, 2, 32, 32), torch.tensor([[3, 1], [0, 2]])
    mine, arrays = pool.numpy().copy(), {n: t.numpy() for n, t in x.items()}
    made = gdn.array.decode(**arrays, pool=mine, ssm_state_indices=slots.numpy(), in_place=1)
    o, _ = KDA(**x, initial_state=pool, ssm_state_indices=slots)
    assert np.array_equal(made["o"], o.numpy()) and np.array_equal(mine, pool.numpy()) and set(made) == {"o"}
    mine.flags.writeable = False
    with pytest.raises(ValueError, match="pool is read-only"):
        gdn.array.decode(**arrays, pool=mine, ssm_state_indices=slots.numpy(), in_place=1)
    with pytest.raises(TypeError, match="needs pool"):
        gdn.array.decode(**arrays)
