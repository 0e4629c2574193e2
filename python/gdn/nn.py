"""The layers: projections, short convolution, delta rule, gated norm and projection back, with the parameters of published checkpoints.

    layer = gdn.nn.GatedDeltaNet(hidden_size=2048)
    y = layer(x)                                     # [B, T, hidden], with gradients
    y = layer(x, cu_seqlens=offsets)                 # packed sequences
    y = layer(x, cp=context.bind(plan))              # tokens over several ranks

    cache = gdn.nn.Cache()
    y = layer(prompt, cache=cache)                   # reads a prompt, then token by token
    y = layer(token, cache=cache)
"""

import torch

from .convolution import ShortConvolution, causal_conv1d
from .delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from .kda import chunk_kda, fused_recurrent_kda
from .norms import FusedRMSNormGated

__all__ = ["Cache", "GatedDeltaNet", "KimiDeltaAttention"]


class Cache:
    """What one layer keeps of the sequences so far; each call of the layer continues them and puts the new one in its place.

    conv: [N, channels, W], the last inputs of the convolution; state: [N, HV, K, V], float32. None before the first call.
    """

    def __init__(self):
        self.conv = self.state = None

    def reorder(self, rows):
        """Takes the sequences `rows` [N'] instead, as beam search does."""
        if self.conv is not None:
            self.conv, self.state = self.conv[rows], self.state[rows]


class _Layer(torch.nn.Module):
    """What both layers do: forward from projected channels on."""

    def __init__(self, **sizes):
        super().__init__()
        for name, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} is {size!r}, expected an integer from 1")
            setattr(self, name, size)
        self._register_load_state_dict_pre_hook(self._rename)

    def _rename(self, state, prefix, *_):
        """Brings the parameters of other layouts into this one's, in place."""
        own = {name.removeprefix(prefix): state.pop(name) for name in [n for n in state if n.startswith(prefix)]}
        for name, value in self._translated(own).items():
            state[prefix + name] = value

    def _convolved(self, channels, weight, cache, cu_seqlens, cp):
        y, conv = causal_conv1d(channels, weight, initial_state=cache and cache.conv, output_final_state=cache is not None, activation="silu",
                                cu_seqlens=cu_seqlens, cp=cp)
        if cache is not None:
            cache.conv = conv
        return y

    def _heads(self, y):
        """q, k and v of the convolved channels."""
        q, k, v = y.split([self.key_dim, self.key_dim, self.value_dim], -1)
        return (x.unflatten(-1, (-1, size)) for x, size in ((q, self.head_k_dim), (k, self.head_k_dim), (v, self.head_v_dim)))

    def _prepared(self, hidden_states, attention_mask, cache, cu_seqlens, cp):
        if hidden_states.dim() != 3 or hidden_states.shape[2] != self.hidden_size:
            raise ValueError(f"hidden_states has shape {list(hidden_states.shape)}, expected [B, T, {self.hidden_size}]")
        if cp is not None:
            if cache is not None or cu_seqlens is not None:
                raise ValueError("cp is given with cache or cu_seqlens: the offsets follow from its plan, and a cache is of one process")
            cp = cp.bound(hidden_states)
        if attention_mask is None:
            return hidden_states, cp
        if attention_mask.shape != hidden_states.shape[:2]:
            raise ValueError(f"attention_mask has shape {list(attention_mask.shape)}, expected [B, T] {list(hidden_states.shape[:2])}")
        return hidden_states * attention_mask.unsqueeze(-1).to(hidden_states.dtype), cp

    def _ruled(self, chunk, recurrent, q, k, v, g, beta, cache, cu_seqlens, cp, **options):
        """The delta rule, continued from the cache."""
        options.update(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, cu_seqlens=cu_seqlens)
        if cache is None:
            return chunk(q, k, v, g, beta, cp=cp, **options)[0]
        rule = recurrent if q.shape[1] == 1 else chunk
        o, cache.state = rule(q, k, v, g, beta=beta, initial_state=cache.state, output_final_state=True, **options)
        return o


def _linear(inputs, outputs, device, dtype):
    return torch.nn.Linear(inputs, outputs, bias=False, device=device, dtype=dtype)


class GatedDeltaNet(_Layer):
    """The Gated DeltaNet layer of Qwen3-Next, Qwen3.5 and OLMo-Hybrid.

    Parameters are named as in Qwen3.5: in_proj_qkv, in_proj_z, in_proj_b, in_proj_a, conv1d, A_log, dt_bias, norm, out_proj.
    ``load_state_dict`` also understands Qwen3-Next (in_proj_qkvz and in_proj_ba, interleaved by key head) and OLMo-Hybrid or
    flash-linear-attention (q_proj, k_proj, v_proj, g_proj, b_proj, a_proj, o_norm, o_proj, and q_conv1d, k_conv1d, v_conv1d).

    Args:
        hidden_size: size of a token's vector.
        num_v_heads, num_k_heads: heads of v, and of q and k; the first is a multiple of the second.
        head_k_dim, head_v_dim: sizes of a key and a value.
        conv_kernel_size: taps of the convolution.
        rms_norm_eps: of the gated norm.
        allow_neg_eigval: beta up to 2 (OLMo-Hybrid).
        layer_idx: kept, for models that count their layers.
    """

    def __init__(self, hidden_size, num_v_heads=32, num_k_heads=16, head_k_dim=128, head_v_dim=128, conv_kernel_size=4, rms_norm_eps=1e-6, *,
                 allow_neg_eigval=False, layer_idx=0, device=None, dtype=None):
        super().__init__(hidden_size=hidden_size, num_v_heads=num_v_heads, num_k_heads=num_k_heads, head_k_dim=head_k_dim, head_v_dim=head_v_dim,
                         conv_kernel_size=conv_kernel_size)
        if num_v_heads % num_k_heads:
            raise ValueError(f"num_v_heads is {num_v_heads}, expected a multiple of num_k_heads={num_k_heads}")
        self.allow_neg_eigval, self.layer_idx = allow_neg_eigval, layer_idx
        self.key_dim, self.value_dim = num_k_heads * head_k_dim, num_v_heads * head_v_dim
        self.conv_dim = 2 * self.key_dim + self.value_dim
        self.in_proj_qkv = _linear(hidden_size, self.conv_dim, device, dtype)
        self.in_proj_z = _linear(hidden_size, self.value_dim, device, dtype)
        self.in_proj_b = _linear(hidden_size, num_v_heads, device, dtype)
        self.in_proj_a = _linear(hidden_size, num_v_heads, device, dtype)
        self.conv1d = ShortConvolution(self.conv_dim, conv_kernel_size, device=device, dtype=dtype)
        # From above 0: a logarithm of -inf would be a head that never decays.
        self.A_log = torch.nn.Parameter(torch.empty(num_v_heads, device=device, dtype=torch.float32).uniform_(0.01, 16).log())
        self.dt_bias = torch.nn.Parameter(torch.ones(num_v_heads, device=device, dtype=torch.float32))
        self.norm = FusedRMSNormGated(head_v_dim, eps=rms_norm_eps, activation="silu", device=device, dtype=dtype)
        self.out_proj = _linear(self.value_dim, hidden_size, device, dtype)

    @classmethod
    def from_config(cls, config, layer_idx=0, **more):
        """The layer of a transformers configuration (Qwen3-Next, Qwen3.5, OLMo-Hybrid)."""
        olmo = hasattr(config, "linear_allow_neg_eigval")
        return cls(config.hidden_size, config.linear_num_value_heads, config.linear_num_key_heads, config.linear_key_head_dim,
                   config.linear_value_head_dim, config.linear_conv_kernel_dim, 1e-5 if olmo else config.rms_norm_eps, layer_idx=layer_idx,
                   allow_neg_eigval=olmo and config.linear_allow_neg_eigval, **more)

    def forward(self, hidden_states, attention_mask=None, cache=None, cu_seqlens=None, cp=None):
        """[B, T, hidden] of hidden_states [B, T, hidden].

        Args:
            attention_mask: [B, T], multiplied into the hidden states: 0 for padding, which must come first.
            cache: a ``Cache``, continued and updated.
            cu_seqlens: [N + 1], offsets of packed sequences, with B = 1. With a cache each sequence is continued.
            cp: a ``gdn.parallel.ContextParallel`` or what its ``bind`` returns; hidden_states are this rank's tokens.
        """
        x, cp = self._prepared(hidden_states, attention_mask, cache, cu_seqlens, cp)
        q, k, v = self._heads(self._convolved(self.in_proj_qkv(x), self.conv1d.weight, cache, cu_seqlens, cp))
        o = self._ruled(chunk_gated_delta_rule, fused_recurrent_gated_delta_rule, q, k, v, self.in_proj_a(x), self.in_proj_b(x), cache, cu_seqlens,
                        cp, A_log=self.A_log, dt_bias=self.dt_bias, allow_neg_eigval=self.allow_neg_eigval)
        z = self.in_proj_z(x).unflatten(-1, (-1, self.head_v_dim))
        return self.out_proj(self.norm(o, z).flatten(2))

    def _translated(self, state):
        H, G, K, V = self.num_k_heads, self.num_v_heads // self.num_k_heads, self.head_k_dim, self.head_v_dim
        if "in_proj_qkvz.weight" in state:  # by key head: its q, k, and the v and z of its value heads
            q, k, v, z = state.pop("in_proj_qkvz.weight").unflatten(0, (H, -1)).split([K, K, G * V, G * V], 1)
            state["in_proj_qkv.weight"] = torch.cat([part.flatten(0, 1) for part in (q, k, v)])
            state["in_proj_z.weight"] = z.flatten(0, 1)
        if "in_proj_ba.weight" in state:
            b, a = state.pop("in_proj_ba.weight").unflatten(0, (H, -1)).split([G, G], 1)
            state["in_proj_b.weight"], state["in_proj_a.weight"] = b.flatten(0, 1), a.flatten(0, 1)
        _joined(state, "in_proj_qkv.weight", [f"{n}_proj.weight" for n in "qkv"])
        _joined(state, "conv1d.weight", [f"{n}_conv1d.weight" for n in "qkv"])
        for theirs, ours in (("g_proj", "in_proj_z"), ("b_proj", "in_proj_b"), ("a_proj", "in_proj_a"), ("o_norm", "norm"), ("o_proj", "out_proj")):
            if theirs + ".weight" in state:
                state[ours + ".weight"] = state.pop(theirs + ".weight")
        return state


class KimiDeltaAttention(_Layer):
    """The Kimi Delta Attention layer of Kimi Linear and its kin.

    Parameters: q_proj, k_proj, v_proj, q_conv1d, k_conv1d, v_conv1d, f_a_proj, f_b_proj, A_log, dt_bias, b_proj, g_proj (or g_a_proj and
    g_b_proj), o_norm, o_proj. ``load_state_dict`` also understands transformers' Kimi Linear (one conv1d, and the decay's gate under
    forget_gate) and an A_log of any shape.

    Args:
        hidden_size: size of a token's vector.
        num_heads, num_v_heads: heads of q and k, and of v, a multiple of the first; None: as many.
        head_k_dim, head_v_dim: sizes of a key and a value.
        conv_kernel_size: taps of the convolution.
        chunk_size: accepted; does not change the result.
        gate_lower_bound: below 0, the lower bound of the log decay; None: the softplus gate of Kimi Linear.
        use_full_rank_gate: whether the output gate is one projection, or two through head_v_dim channels (Kimi Linear).
        rms_norm_eps: of the gated norm.
        layer_idx: kept, for models that count their layers.
    """

    def __init__(self, hidden_size, num_heads=32, num_v_heads=None, head_k_dim=128, head_v_dim=128, conv_kernel_size=4, chunk_size=64,
                 gate_lower_bound=-5.0, use_full_rank_gate=True, rms_norm_eps=1e-6, layer_idx=0, *, device=None, dtype=None):
        num_v_heads = num_heads if num_v_heads is None else num_v_heads
        super().__init__(hidden_size=hidden_size, num_heads=num_heads, num_v_heads=num_v_heads, head_k_dim=head_k_dim, head_v_dim=head_v_dim,
                         conv_kernel_size=conv_kernel_size, chunk_size=chunk_size)
        if num_v_heads % num_heads:
            raise ValueError(f"num_v_heads is {num_v_heads}, expected a multiple of num_heads={num_heads}")
        if gate_lower_bound is not None and not gate_lower_bound < 0:
            raise ValueError(f"gate_lower_bound is {gate_lower_bound}, expected a number below 0")
        self.gate_lower_bound, self.use_full_rank_gate, self.layer_idx = gate_lower_bound, use_full_rank_gate, layer_idx
        self.key_dim, self.value_dim = num_heads * head_k_dim, num_v_heads * head_v_dim
        for name, width in zip("qkv", (self.key_dim, self.key_dim, self.value_dim)):
            setattr(self, f"{name}_proj", _linear(hidden_size, width, device, dtype))
            setattr(self, f"{name}_conv1d", ShortConvolution(width, conv_kernel_size, device=device, dtype=dtype))
        self.f_a_proj = _linear(hidden_size, head_k_dim, device, dtype)
        self.f_b_proj = _linear(head_k_dim, num_v_heads * head_k_dim, device, dtype)
        self.A_log = torch.nn.Parameter(torch.empty(num_v_heads, device=device, dtype=torch.float32).uniform_(1, 16).log())
        self.dt_bias = torch.nn.Parameter(torch.zeros(num_v_heads * head_k_dim, device=device, dtype=torch.float32))
        self.b_proj = _linear(hidden_size, num_v_heads, device, dtype)
        if use_full_rank_gate:
            self.g_proj = _linear(hidden_size, self.value_dim, device, dtype)
        else:
            self.g_a_proj = _linear(hidden_size, head_v_dim, device, dtype)
            self.g_b_proj = _linear(head_v_dim, self.value_dim, device, dtype)
        self.o_norm = FusedRMSNormGated(head_v_dim, eps=rms_norm_eps, activation="sigmoid", device=device, dtype=dtype)
        self.o_proj = _linear(self.value_dim, hidden_size, device, dtype)

    @classmethod
    def from_config(cls, config, layer_idx=0, **more):
        """The layer of transformers' Kimi Linear configuration."""
        return cls(config.hidden_size, config.linear_num_heads, None, config.linear_head_dim, config.linear_head_dim, config.linear_conv_kernel_dim,
                   gate_lower_bound=None, use_full_rank_gate=False, rms_norm_eps=config.rms_norm_eps, layer_idx=layer_idx, **more)

    def forward(self, hidden_states, attention_mask=None, cache=None, cu_seqlens=None, cp=None):
        """As ``GatedDeltaNet.forward``."""
        x, cp = self._prepared(hidden_states, attention_mask, cache, cu_seqlens, cp)
        channels = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)
        weight = torch.cat([self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight])
        q, k, v = self._heads(self._convolved(channels, weight, cache, cu_seqlens, cp))
        g = self.f_b_proj(self.f_a_proj(x)).unflatten(-1, (-1, self.head_k_dim))
        o = self._ruled(chunk_kda, fused_recurrent_kda, q, k, v, g, self.b_proj(x), cache, cu_seqlens, cp, A_log=self.A_log, dt_bias=self.dt_bias,
                        lower_bound=self.gate_lower_bound)
        gate = self.g_proj(x) if self.use_full_rank_gate else self.g_b_proj(self.g_a_proj(x))
        return self.o_proj(self.o_norm(o, gate.unflatten(-1, (-1, self.head_v_dim))).flatten(2))

    def _translated(self, state):
        if "conv1d.weight" in state:
            parts = state.pop("conv1d.weight").split([self.key_dim, self.key_dim, self.value_dim])
            state.update(zip((f"{n}_conv1d.weight" for n in "qkv"), parts))
        state = {name.removeprefix("forget_gate."): value for name, value in state.items()}
        for name in ("A_log", "dt_bias"):
            if name in state:
                state[name] = state[name].reshape(-1)
        return state


def _joined(state, name, parts):
    """Puts the parts, if they are there, under one name."""
    if all(part in state for part in parts):
        state[name] = torch.cat([state.pop(part) for part in parts])
