"""What PyTorch asks of an operator: schema, fakes, gradients, compilation, export, autocast, checkpoints."""

import copy
import pickle

import pytest
import torch
from torch.library import opcheck

import gdn
from gdn import library
from gdn._lib import OPS

# Operators of the composite families; others have tests of their own.
TAPED = [name for name, op in OPS.items() if any(t["name"] == "tape" for t in op.row["tensors"])]
CHUNK, RECURRENT = gdn.chunk_gated_delta_rule, gdn.fused_recurrent_gated_delta_rule
# The operators that go by a sequence's tokens and leave a tape; the others have tests of their own.
TAPED = [name for name, op in OPS.items() if any(t["name"] == "tape" for t in op.row["tensors"])]
both = pytest.mark.parametrize("function", [CHUNK, RECURRENT])


def tensors(B=1, T=20, H=1, HV=2, K=8, V=6, dtype=torch.float32, grad=True, **more):
    x = dict(q=torch.randn(B, T, H, K), k=torch.nn.functional.normalize(torch.randn(B, T, H, K), dim=-1), v=torch.randn(B, T, HV, V),
             g=-torch.rand(B, T, HV), beta=torch.rand(B, T, HV), initial_state=torch.randn(B, HV, K, V))
    x.update(more)
    return {n: t.to(dtype).requires_grad_(grad) for n, t in x.items()}


def results(function, x, **options):
    o, ht = function(**x, output_final_state=True, **options)
    return [o, ht, *torch.autograd.grad(o.sin().sum() + ht.square().sum(), list(x.values()))]


def operands(name, grad, everything=True):
    """Arguments of a torch operator, tensors for all inputs or for the required ones."""
    row = OPS[name].row
    kda = name.startswith("kda")
    x = tensors(grad=grad, **({"g": -torch.rand(1, 20, 2, 8)} if kda else {}))
    forward = row["name"].replace("bwd", "fwd")
    given = dict(q=x["q"], k=x["k"], v=x["v"])
    numbers = dict(scale=0.5, qk_l2norm=True)
    if everything:
        given.update(g=x["g"], beta=x["beta"], initial_state=x["initial_state"], A_log=torch.rand(2), dt_bias=torch.rand(2, 8) if kda else torch.rand(2),
                     cu_seqlens=torch.tensor([0, 20]))
        numbers.update(gate=True, beta_sigmoid=True, lower_bound=-5.0)
        if name in ("recurrent_fwd", "recurrent_bwd"):
            given.update(gk=-torch.rand(1, 20, 2, 8), gv=-torch.rand(1, 20, 2, 6))
    numbers = {n["name"]: numbers.get(n["name"], 0.0 if n["float"] else False) for n in row["numbers"]}
    if forward != name:
        with torch.no_grad():
            o, ht, tape, *_ = library.operator(forward)(*[given.get(t["name"]) for t in library.inputs(OPS[forward].row)], *numbers.values(),
                                                        *wishes(forward, True, True))
        given.update(tape=tape, dout=torch.randn_like(o))
        if everything:
            given.update(dht=torch.randn_like(ht))
    return [given.get(t["name"]) for t in library.inputs(row)] + list(numbers.values())


def wishes(name, final_state, save):
    asked = {"output_final_state": final_state, "save": save, "return_intermediate_states": final_state}
    return [asked[want] for want in library.wants(OPS[name].row)]


@pytest.mark.parametrize("everything", [True, False])
@pytest.mark.parametrize("name", [name for name in TAPED if name.endswith("fwd")])
def test_opcheck_forward(name, everything):
    for final_state, save, grad in ((True, False, True), (False, True, True), (True, True, False), (False, False, False)):
        opcheck(library.operator(name), (*operands(name, grad, everything), *wishes(name, final_state, save)))


@pytest.mark.parametrize("everything", [True, False])
@pytest.mark.parametrize("name", [name for name in TAPED if name.endswith("bwd")])
def test_opcheck_backward(name, everything):
    opcheck(library.operator(name), tuple(operands(name, False, everything)))


def test_every_operator_is_registered_with_its_schema():
    for name, op in OPS.items():
        assert str(library.operator(name)._schema) == "gdn::" + library.schema(op.row)


@both
@pytest.mark.parametrize("options", [
    {}, {"state_v_first": True}, {"use_qk_l2norm_in_kernel": True, "scale": 0.3}, {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True},
    {"use_gate_in_kernel": True}, {"cu_seqlens": torch.tensor([0, 2, 2, 6])},
])
def test_gradcheck(function, options):
    h0 = torch.randn(3 if "cu_seqlens" in options else 1, 2, 3, 2)
    more = {"initial_state": h0.transpose(2, 3) if options.get("state_v_first") else h0}
    if options.get("use_gate_in_kernel"):
        more.update(A_log=torch.rand(2), dt_bias=torch.rand(2))
    if function is RECURRENT:
        more.update(gk=-torch.rand(1, 6, 2, 3), gv=-torch.rand(1, 6, 2, 2), beta=torch.rand(1, 6, 2, 2))
    x = tensors(T=6, K=3, V=2, dtype=torch.float64, **more)
    names = list(x)
    assert torch.autograd.gradcheck(lambda *t: function(**dict(zip(names, t)), output_final_state=True, **options), list(x.values()))


@both
def test_gradcheck_across_a_chunk(function):
    x = tensors(T=67, H=1, HV=1, K=2, V=2, dtype=torch.float64)
    names = list(x)
    assert torch.autograd.gradcheck(lambda *t: function(**dict(zip(names, t)), output_final_state=True), list(x.values()), fast_mode=True)


@both
def test_compile_fullgraph(function):
    compiled = torch.compile(function, fullgraph=True)
    for T in (20, 33, 70):  # the second length makes the sizes symbolic
        x = tensors(T=T)
        for got, expected in zip(results(compiled, x), results(function, x)):
            assert torch.equal(got, expected)


@both
def test_compile_with_every_option(function):
    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    for T, cu in ((40, [0, 3, 3, 39]), (61, [0, 30, 60, 61])):
        x = tensors(T=T, initial_state=torch.randn(3, 2, 6, 8), A_log=torch.randn(2, 1), dt_bias=torch.randn(1, 2))
        options = dict(cu_seqlens=torch.tensor(cu), use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
                       allow_neg_eigval=True, state_v_first=True, scale=0.7)
        for got, expected in zip(results(compiled, x, **options), results(function, x, **options)):
            assert torch.equal(got, expected)


@both
def test_compile_without_gradient(function):
    x = tensors(grad=False)
    with torch.no_grad():
        got = torch.compile(function, fullgraph=True)(**x, output_final_state=True)
    for a, b in zip(got, function(**x, output_final_state=True)):
        assert torch.equal(a, b)


@both
def test_export(function, tmp_path):
    class Layer(torch.nn.Module):
        def forward(self, q, k, v, g, beta, initial_state):
            return function(q, k, v, g=g, beta=beta, initial_state=initial_state, output_final_state=True)

    x = tensors(grad=False)
    dynamic = {n: None if n == "initial_state" else {1: torch.export.Dim("T", min=2, max=4096)} for n in x}
    program = torch.export.export(Layer(), (), x, dynamic_shapes=dynamic)
    torch.export.save(program, str(tmp_path / "layer.pt2"))
    loaded = torch.export.load(str(tmp_path / "layer.pt2")).module()
    for T in (20, 77):
        x = tensors(T=T, grad=False)
        for got, expected in zip(loaded(**x), function(**x, output_final_state=True)):
            assert torch.equal(got, expected)


@both
def test_meta_tensors_have_the_shapes(function):
    x = tensors(B=2, T=5, HV=2, V=4)
    o, ht = function(**x, output_final_state=True)
    mo, mht = function(**{n: t.to("meta") for n, t in x.items()}, output_final_state=True)
    assert (mo.shape, mo.dtype, mht.shape, mht.dtype) == (o.shape, o.dtype, ht.shape, ht.dtype)


@both
def test_meta_refuses_a_wrong_rank(function):
    x = {n: t.to("meta") for n, t in tensors().items()}
    with pytest.raises(ValueError, match="shapes do not fit"):
        function(**{**x, "q": x["q"][0]})


@both
def test_double_backward_is_refused(function):
    x = tensors()
    o, _ = function(**x)
    (dq,) = torch.autograd.grad(o.sum(), x["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        dq.sum().backward()


@both
def test_forward_mode_is_refused(function):
    x = tensors(grad=False)
    q = x.pop("q")
    with pytest.raises(RuntimeError, match="forward-mode"):
        torch.func.jvp(lambda q: function(q, **x)[0], (q,), (q,))


@both
def test_gradient_under_torch_func_is_refused(function):
    x = tensors(grad=False)
    q = x.pop("q")
    with pytest.raises(RuntimeError, match="torch.func"):
        torch.func.grad(lambda q: function(q, **x)[0].sum())(q)


@both
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_is_a_loop(function):
    x = tensors(grad=False)
    q = torch.stack([x.pop("q"), torch.randn(1, 20, 1, 8)])
    got = torch.func.vmap(lambda q: function(q, **x)[0])(q)
    assert torch.equal(got, torch.stack([function(p, **x)[0] for p in q]))


@both
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpoint(function, reentrant):
    from torch.utils.checkpoint import checkpoint

    def checkpointed(**kwargs):
        output_final_state = kwargs.pop("output_final_state")
        names = list(kwargs)
        return checkpoint(lambda *t: function(**dict(zip(names, t)), output_final_state=output_final_state), *kwargs.values(),
                          use_reentrant=reentrant)

    x = tensors(T=70)
    if reentrant:  # is not for torch.autograd.grad
        o, ht = checkpointed(**x, output_final_state=True)
        (o.sin().sum() + ht.square().sum()).backward()
        got = [o, ht, *(t.grad for t in x.values())]
    else:
        got = results(checkpointed, x)
    for a, b in zip(got, results(function, x)):
        assert torch.equal(a, b)


@both
def test_autocast_leaves_dtypes_alone(function):
    x = tensors()
    q, k, v = (x[n].detach().bfloat16().requires_grad_() for n in "qkv")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, ht = function(q, k, v, g=x["g"], beta=x["beta"], initial_state=x["initial_state"], output_final_state=True)
    plain, plain_ht = function(q, k, v, g=x["g"], beta=x["beta"], initial_state=x["initial_state"], output_final_state=True)
    assert o.dtype == torch.bfloat16 and ht.dtype == torch.float32
    assert torch.equal(o, plain) and torch.equal(ht, plain_ht)
    o.sum().backward()
    assert (q.grad.dtype, x["g"].grad.dtype, x["beta"].grad.dtype, x["initial_state"].grad.dtype) == (torch.bfloat16,) + (torch.float32,) * 3


@both
def test_inference_mode(function):
    x = tensors()
    with torch.inference_mode():
        o, ht = function(**x, output_final_state=True)
    expected = function(**x, output_final_state=True)
    assert torch.equal(o, expected[0]) and torch.equal(ht, expected[1]) and not o.requires_grad


@both
def test_tape_is_saved_only_for_a_gradient(function):
    saved = []
    x = tensors()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        with torch.no_grad():
            function(**x)
        function(**{n: t.detach() for n, t in x.items()})
        assert not saved
        function(**x)
        assert saved
    name = "fwd" if function is CHUNK else "recurrent_fwd"
    none, tape = (library.operator(name)(*operands(name, False), False, save)[2] for save in (False, True))
    assert none.shape == (0,) and (tape.numel() > 0 or name == "recurrent_fwd")


@both
def test_only_wanted_gradients_come_back(function):
    x = tensors(grad=False)
    x["v"].requires_grad_()
    o, _ = function(**x)
    o.sum().backward()
    assert x["v"].grad is not None and all(x[n].grad is None for n in x if n != "v")


@both
def test_gradient_of_one_output_alone(function):
    x = tensors()
    o, ht = function(**x, output_final_state=True)
    zero = torch.zeros_like
    of_o, of_ht = (torch.autograd.grad(y, list(x.values()), d, retain_graph=True) for y, d in ((o, torch.ones_like(o)), (ht, ht.detach())))
    with_zero = torch.autograd.grad([o, ht], list(x.values()), [torch.ones_like(o), zero(ht)], retain_graph=True)
    zero_with = torch.autograd.grad([o, ht], list(x.values()), [zero(o), ht.detach()])
    for a, b in zip((*of_o, *of_ht), (*with_zero, *zero_with)):
        assert torch.equal(a, b)
    assert of_ht[0].abs().max() == 0  # the state does not depend on the queries


@both
def test_upstream_gradients_of_any_layout(function):
    x = tensors(T=9)
    o, ht = function(**x, output_final_state=True)
    do, dht = torch.randn(1, 2, 9, 6).transpose(1, 2), torch.randn(1, 2, 6, 8).transpose(2, 3)
    for one, other in ((do, dht), (torch.ones(1).expand_as(o), torch.ones(()).expand_as(ht)), (do.flip(1), dht[..., ::1])):
        strided = torch.autograd.grad([o, ht], list(x.values()), [one, other], retain_graph=True)
        compact = torch.autograd.grad([o, ht], list(x.values()), [one.contiguous(), other.contiguous()], retain_graph=True)
        for a, b in zip(strided, compact):
            assert torch.equal(a, b)


@both
def test_gradients_have_the_dtypes_and_shapes_of_the_inputs(function):
    x = tensors(T=70, A_log=torch.randn(1, 1, 2), dt_bias=torch.randn(2, 1))
    dtypes = dict(q=torch.bfloat16, k=torch.float16, v=torch.bfloat16, g=torch.float16, beta=torch.bfloat16, initial_state=torch.float16,
                  A_log=torch.float64, dt_bias=torch.bfloat16)
    x = {n: t.detach().to(dtypes[n]).requires_grad_() for n, t in x.items()}
    o, ht = function(**x, use_gate_in_kernel=True, output_final_state=True)
    assert o.dtype == torch.bfloat16 and ht.dtype == torch.float32
    (o.float().sum() + ht.sum()).backward()
    for n, t in x.items():
        assert t.grad.dtype == t.dtype and t.grad.shape == t.shape and t.grad.isfinite().all()


def test_functions_can_be_copied_and_pickled():
    for function in (CHUNK, RECURRENT):
        assert copy.deepcopy(function) is function and pickle.loads(pickle.dumps(function)) is function


@both
def test_module_with_the_operator_can_be_copied(function):
    x = tensors()
    model = torch.nn.Linear(6, 6)
    model.delta_rule = function
    twin = copy.deepcopy(model)
    for m in (model, twin):
        o, _ = m.delta_rule(**{**x, "v": m(x["v"])})
        o.sum().backward()
    assert torch.equal(model.weight.grad, twin.weight.grad)


@both
def test_inputs_are_left_alone(function):
    x = tensors(T=70)
    before = {n: t.detach().clone() for n, t in x.items()}
    results(function, x)
    for n, t in x.items():
        assert torch.equal(t, before[n]) and t._version == 0


def test_profiler_and_modes_see_the_operator():
    """The short way to the CPU must not pass by those who look on."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    x = tensors(grad=False)
    with Mode():
        CHUNK(**x)
    with torch.profiler.profile() as profile:
        RECURRENT(**x)
    assert "gdn.fwd.default" in seen
    assert any(event.key == "gdn::recurrent_fwd" for event in profile.key_averages())
