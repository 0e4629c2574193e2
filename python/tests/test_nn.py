"""The layers: against transformers' with its parameters, packed sequences, prefill and steps, training."""

import pytest
import torch

from gdn import nn

SIZES = dict(head_k_dim=8, head_v_dim=12, conv_kernel_size=4)


def layers():
    torch.manual_seed(0)
    made = [nn.GatedDeltaNet(24, num_v_heads=4, num_k_heads=2, **SIZES), nn.GatedDeltaNet(24, num_v_heads=2, num_k_heads=2, allow_neg_eigval=True, **SIZES),
            nn.KimiDeltaAttention(24, num_heads=2, **SIZES), nn.KimiDeltaAttention(24, 2, 4, gate_lower_bound=None, use_full_rank_gate=False, **SIZES)]
    with torch.no_grad():
        for layer in made:
            for p in layer.parameters():
                if p.dim() > 1:
                    p.mul_(2)
    return made


each = pytest.mark.parametrize("layer", layers(), ids=["gdn", "gdn-neg", "kda", "kda-softplus"])


def close(a, b, most=2e-5):
    assert a.shape == b.shape and (a - b).abs().max() <= most * b.abs().max(), (a - b).abs().max()


@each
def test_training(layer):
    x = torch.randn(2, 70, 24).requires_grad_()
    y = layer(x)
    assert y.shape == x.shape
    grads = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
    assert all(torch.isfinite(g).all() and g.abs().max() > 0 for g in grads)
    assert torch.equal(layer(x, attention_mask=torch.ones(2, 70)), y)


@each
def test_packed_sequences(layer):
    cu = [0, 5, 5, 38, 70]
    x = torch.randn(1, 70, 24)
    y = layer(x, cu_seqlens=torch.tensor(cu))
    for begin, end in zip(cu, cu[1:]):
        if begin < end:
            close(y[:, begin:end], layer(x[:, begin:end]))


@each
@torch.no_grad()
def test_prefill_and_steps(layer):
    x, cache = torch.randn(3, 30, 24), nn.Cache()
    whole = layer(x)
    pieces = [layer(x[:, :17], cache=cache), layer(x[:, 17:24], cache=cache)] + [layer(x[:, t:t + 1], cache=cache) for t in range(24, 30)]
    close(torch.cat(pieces, 1), whole)
    cache.reorder(torch.tensor([2, 0]))
    again = layer(x[:2, :1], cache=cache)
    assert again.shape == (2, 1, 24) and cache.state.shape[0] == 2


@each
@torch.no_grad()
def test_prompts_packed_then_steps(layer):
    cu, x, cache = [0, 9, 10, 25], torch.randn(1, 25, 24), nn.Cache()
    layer(x, cache=cache, cu_seqlens=torch.tensor(cu))
    step = torch.randn(3, 1, 24)
    y = layer(step, cache=cache)
    for n, (begin, end) in enumerate(zip(cu, cu[1:])):
        close(y[n:n + 1], layer(torch.cat([x[:, begin:end], step[n:n + 1]], 1))[:, -1:])


@each
def test_padding_in_front_counts_for_nothing(layer):
    x, mask = torch.randn(1, 20, 24), torch.ones(1, 20)
    mask[:, :6] = 0
    close(layer(x, attention_mask=mask)[:, 6:], layer(x[:, 6:]))


@each
def test_bfloat16(layer):
    x = torch.randn(1, 40, 24)
    low = type(layer)(24, *((layer.num_v_heads, layer.num_k_heads) if isinstance(layer, nn.GatedDeltaNet) else (layer.num_heads, layer.num_v_heads)),
                      **SIZES, dtype=torch.bfloat16, **({"allow_neg_eigval": layer.allow_neg_eigval} if isinstance(layer, nn.GatedDeltaNet) else
                                                        {"gate_lower_bound": layer.gate_lower_bound, "use_full_rank_gate": layer.use_full_rank_gate}))
    low.load_state_dict(layer.state_dict())
    assert low.A_log.dtype == low.dt_bias.dtype == torch.float32
    y = low(x.bfloat16())
    assert y.dtype == torch.bfloat16
    close(y.float(), layer(x), 0.1)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "olmo_hybrid", "kimi_linear"])
def test_parameters_of_transformers(name):
    pytest.importorskip("transformers")
    import importlib

    try:
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        configs = importlib.import_module(f"transformers.models.{name}.configuration_{name}")
    except ImportError:
        pytest.skip(f"this transformers has no {name}")
    shared = dict(hidden_size=24, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], linear_conv_kernel_dim=4)
    if name == "kimi_linear":
        config = configs.KimiLinearConfig(**shared, linear_num_heads=2, linear_head_dim=8)
        theirs, ours = module.KimiLinearDeltaAttention(config, 0), nn.KimiDeltaAttention.from_config(config)
        for p in (theirs.forget_gate.A_log, theirs.forget_gate.dt_bias):
            torch.nn.init.uniform_(p, -1, 1)
    else:
        prefix = {"qwen3_next": "Qwen3Next", "qwen3_5": "Qwen3_5", "olmo_hybrid": "OlmoHybrid"}[name]
        config = getattr(configs, {"qwen3_5": "Qwen3_5Text"}.get(name, prefix) + "Config")(
            **shared, linear_num_value_heads=4 if name != "olmo_hybrid" else 2, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=12)
        theirs, ours = getattr(module, prefix + "GatedDeltaNet")(config, 0), nn.GatedDeltaNet.from_config(config)
    torch.nn.init.uniform_(getattr(theirs, "norm", None).weight if hasattr(theirs, "norm") else theirs.o_norm.weight, 0.5, 1.5)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 37, 24)
    close(ours(x), theirs(x), 1e-4)


@pytest.mark.parametrize("call, words", [
    (lambda: nn.GatedDeltaNet(0), "hidden_size is 0"),
    (lambda: nn.GatedDeltaNet(8, num_v_heads=3, num_k_heads=2), "num_v_heads is 3"),
    (lambda: nn.KimiDeltaAttention(8, 2, 3), "num_v_heads is 3"),
    (lambda: nn.KimiDeltaAttention(8, 2, gate_lower_bound=0.5), "gate_lower_bound is 0.5"),
    (lambda: layers()[0](torch.ones(2, 3, 5)), "hidden_states has shape"),
    (lambda: layers()[0](torch.ones(2, 3, 24), attention_mask=torch.ones(2, 4)), "attention_mask has shape"),
    (lambda: layers()[0](torch.ones(2, 3, 24), cache=nn.Cache(), cp=object()), "cp is given with cache"),
])
def test_what_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
