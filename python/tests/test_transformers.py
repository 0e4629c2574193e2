"""Models of transformers, patched against unpatched; needs the package transformers."""

import inspect

import pytest
import torch

transformers = pytest.importorskip("transformers")

import gdn.transformers as ours  # noqa: E402


@pytest.fixture(autouse=True)
def _unpatch():
    yield
    ours.unpatch_transformers()


SMALL = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1,
             head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=8)
MODELS = {
    "Qwen3Next": dict(SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16,
                      layer_types=["linear_attention"] * 3 + ["full_attention"]),
    "Qwen3_5Text": dict(SMALL, layer_types=["linear_attention"] * 3 + ["full_attention"]),
    "KimiLinear": dict(vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=4, num_attention_heads=2,
                       num_key_value_heads=2, kv_lora_rank=8, qk_rope_head_dim=8, v_head_dim=16, qk_nope_head_dim=8, num_experts_per_tok=2,
                       num_local_experts=4, linear_head_dim=16, linear_num_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
                       layer_types=["linear_attention"] * 3 + ["full_attention"]),
    "OlmoHybrid": dict(SMALL, linear_num_value_heads=2, linear_allow_neg_eigval=True, pad_token_id=0, bos_token_id=1, eos_token_id=2,
                       layer_types=["linear_attention"] * 3 + ["full_attention"]),
}


def build(name):
    config = getattr(transformers, name + "Config", None)
    causal = getattr(transformers, {"Qwen3_5Text": "Qwen3_5"}.get(name, name) + "ForCausalLM", None)
    if config is None or causal is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    torch.manual_seed(0)
    model = causal(config(**MODELS[name]))
    with torch.no_grad():  # initial weights of 0.02 would leave gradients below what float32 resolves
        for n, p in model.named_parameters():
            if p.dim() > 1 and not n.endswith("A_log"):
                p.mul_(4)
    return model


def train(model, ids):
    model.zero_grad()
    out = model(ids, labels=ids)
    out.loss.backward()
    return out.logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_model(name):
    model = build(name)
    ids = torch.randint(3, 64, (2, 70))
    logits, grads = train(model, ids)
    generated = model.generate(ids[:, :9], max_new_tokens=12, do_sample=False)
    assert ours.patch_transformers(model) > 0
    assert ours.patch_transformers(model) == 0
    with torch.profiler.profile() as profile:
        patched_logits, patched_grads = train(model, ids)
        patched_generated = model.generate(ids[:, :9], max_new_tokens=12, do_sample=False)
    calls = {event.key for event in profile.key_averages()}
    family = "gdn::kda_" if name == "KimiLinear" else "gdn::"
    assert {family + "fwd", family + "bwd", family + "recurrent_fwd", "gdn::conv_fwd", "gdn::conv_bwd"} <= calls
    torch.testing.assert_close(patched_logits, logits, rtol=1e-4, atol=1e-4 * float(logits.abs().max()))
    assert torch.equal(patched_generated, generated)
    assert patched_grads.keys() == grads.keys()
    for n, g in grads.items():
        # Their gradient of the gate is a difference of large sums; it is exact to some 1e-3 only.
        bound = 1e-2 if n.endswith(("A_log", "dt_bias", "a_proj.weight", "in_proj_a.weight", "f_a_proj.weight", "f_b_proj.weight")) else 2e-4
        error = float((patched_grads[n] - g).norm() / (g.norm() + 1e-6))
        assert error < bound, f"{n}: {error:.1e}, norm {float(g.norm()):.1e}"
    assert ours.unpatch_transformers(model) > 0
    assert torch.equal(train(model, ids)[0], logits)


def functions():
    for module in ours._modules():
        for name in ours._RULES:
            if hasattr(module, name):
                yield pytest.param(name, getattr(module, name), id=f"{module.__name__.split('.')[-1]}-{name}")


@pytest.mark.parametrize("name, theirs", list(functions()))
def test_function(name, theirs):
    """Same arguments in the same order, same result."""
    mine = ours._OURS[name]
    named = [p for p in inspect.signature(theirs).parameters.values() if p.kind == p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in inspect.signature(mine).parameters.values()][:len(named)] == [p.name for p in named]
    for p in named:
        assert p.default in (p.empty, inspect.signature(mine).parameters[p.name].default)
    gates = (2, 70, 4, 16) if mine.__name__.endswith("kda") else (2, 70, 4)
    x = [torch.randn(2, 70, 4, 16), torch.randn(2, 70, 4, 16), torch.randn(2, 70, 4, 8), -torch.rand(gates), torch.rand(2, 70, 4)]
    for dtype in (torch.float32, torch.bfloat16):
        low = [t.to(dtype) for t in x]
        options = dict(initial_state=torch.randn(2, 4, 16, 8), output_final_state=True, use_qk_l2norm_in_kernel=True)
        o, state = mine(*low, **options)
        their_o, their_state = theirs(*low, **options)
        assert o.dtype == their_o.dtype == dtype
        bound = 1e-4 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(o, their_o, rtol=bound, atol=bound)
        torch.testing.assert_close(state.float(), their_state.float(), rtol=bound, atol=bound)
        assert mine(*low, initial_state=None, output_final_state=False)[1] is None


def convolutions():
    for module in ours._modules():
        for name in ("causal_conv1d_fn", "causal_conv1d_update"):
            if "hidden_states" in inspect.signature(getattr(module, name, lambda: None)).parameters:
                yield pytest.param(name, getattr(module, name), id=f"{module.__name__.split('.')[-1]}-{name}")


@pytest.mark.parametrize("name, theirs", list(convolutions()))
def test_convolution(name, theirs):
    for dtype, activation in ((torch.float32, "silu"), (torch.float32, None), (torch.float32, "gelu"), (torch.bfloat16, "silu")):
        x, weight, bias = (torch.randn(s).to(dtype) for s in ((2, 12, 9), (12, 4), (12,)))
        bound = 1e-5 if dtype == torch.float32 else 3e-2
        if name == "causal_conv1d_fn":
            torch.testing.assert_close(ours._OURS[name](x, weight, bias, activation), theirs(x, weight, bias, activation), rtol=bound, atol=bound)
            continue
        states = [torch.randn(2, 12, 4).to(dtype)] * 2
        states[1] = states[0].clone()
        got, want = (f(x[..., :1], s, weight, bias, activation) for f, s in zip((ours._OURS[name], theirs), states))
        torch.testing.assert_close(got, want, rtol=bound, atol=bound)
        assert torch.equal(*states)


def test_convolution_of_packed_sequences():
    x, weight = torch.randn(1, 6, 10), torch.randn(6, 4)
    parts = torch.cat([ours.causal_conv1d_fn(x[..., a:b], weight, None, "silu") for a, b in ((0, 3), (3, 10))], -1)
    assert torch.equal(ours.causal_conv1d_fn(x, weight, None, "silu", cu_seq_lens_q=torch.tensor([0, 3, 10], dtype=torch.int32)), parts)
    assert torch.equal(ours.causal_conv1d_fn(x, weight, None, "silu", seq_idx=torch.tensor([[0] * 3 + [1] * 7])), parts)


def test_other_devices_keep_their_function():
    for module in ours._modules():
        name = next(name for name in ours._RULES if hasattr(module, name))
        calls = []
        original = getattr(module, name)

        def theirs(query, *args, **kwargs):
            calls.append(query.device.type)
            return query, None

        theirs.__name__ = name
        setattr(module, name, theirs)
        try:
            ours.patch_transformers()
            getattr(module, name)(torch.empty(1, 2, 1, 4, device="meta"), None, None, None, None)
            assert calls == ["meta"]
        finally:
            ours.unpatch_transformers()
            setattr(module, name, original)
