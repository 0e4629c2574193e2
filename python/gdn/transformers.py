"""Gated DeltaNet and Kimi Delta Attention models of Hugging Face transformers on libgdn.

On a CPU the models run their layers as PyTorch code. Either replace those functions for all models::

    import gdn.transformers
    gdn.transformers.patch_transformers()

or take the functions from here: they have the names and arguments of the ones that the models' modules define.
"""

import functools
import importlib
import importlib.util
import inspect
import sys

import torch

from .convolution import causal_conv1d_fn as _packaged
from .convolution import causal_conv1d_update as _update
from .convolution import causal_conv1d as _convolution
from .delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from .kda import chunk_kda, fused_recurrent_kda

__all__ = ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "torch_chunk_kda", "torch_recurrent_kda", "causal_conv1d_fn",
           "causal_conv1d_update", "patch_transformers", "unpatch_transformers"]

# Other modules that define the functions are found once they are imported.
MODELS = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "kimi_linear", "glm5_next")


def torch_chunk_gated_delta_rule(query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False,
                                 use_qk_l2norm_in_kernel=False, cu_seqlens=None, **kwargs):
    """``gdn.chunk_gated_delta_rule`` with the arguments of transformers' function of this name. As there, o has the dtype of the queries and
    keywords meant for other implementations are accepted; ``chunk_size`` does not change the result."""
    o, final_state = chunk_gated_delta_rule(query, key, value, g, beta, initial_state=initial_state, output_final_state=output_final_state,
                                            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens)
    return o.to(query.dtype), final_state


def torch_recurrent_gated_delta_rule(query, key, value, g, beta, initial_state=None, output_final_state=False,
                                     use_qk_l2norm_in_kernel=False, cu_seqlens=None, **kwargs):
    """``gdn.fused_recurrent_gated_delta_rule`` likewise."""
    o, final_state = fused_recurrent_gated_delta_rule(query, key, value, g, beta=beta, initial_state=initial_state,
                                                      output_final_state=output_final_state,
                                                      use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens)
    return o.to(query.dtype), final_state


def torch_chunk_kda(query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False,
                    use_qk_l2norm_in_kernel=False, cu_seqlens=None, **kwargs):
    """``gdn.chunk_kda`` likewise."""
    o, final_state = chunk_kda(query, key, value, g, beta, initial_state=initial_state, output_final_state=output_final_state,
                               use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens)
    return o.to(query.dtype), final_state


def torch_recurrent_kda(query, key, value, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
                        cu_seqlens=None, **kwargs):
    """``gdn.fused_recurrent_kda`` likewise."""
    o, final_state = fused_recurrent_kda(query, key, value, g, beta, initial_state=initial_state, output_final_state=output_final_state,
                                         use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens)
    return o.to(query.dtype), final_state


def causal_conv1d_fn(hidden_states, weight, bias=None, activation=None, seq_idx=None, cu_seq_lens_q=None, **kwargs):
    """``gdn.causal_conv1d`` likewise: hidden_states and the result are [B, D, T]. Packed sequences, by the number of each token's (seq_idx) or
    their offsets (cu_seq_lens_q), do not see each other."""
    inner = activation if activation in (None, "silu", "swish") else None
    if seq_idx is not None:
        y = _packaged(hidden_states, weight, bias, seq_idx=seq_idx, activation=inner)
    else:
        y = _convolution(hidden_states.transpose(1, 2), weight, bias, activation=inner, cu_seqlens=cu_seq_lens_q)[0].transpose(1, 2)
    return y if inner == activation else _activated(y, activation)


def causal_conv1d_update(hidden_states, conv_state, weight, bias=None, activation=None):
    """``gdn.convolution.causal_conv1d_update`` likewise; conv_state is updated in place."""
    inner = activation if activation in (None, "silu", "swish") else None
    with torch.no_grad():
        y = _update(hidden_states, conv_state, weight, bias, inner)
    return y if inner == activation else _activated(y, activation)


def _activated(y, activation):
    from transformers.activations import ACT2FN

    return ACT2FN[activation](y)


# Under the names of transformers' functions; those of Kimi Delta Attention go by two.
_OURS = {f.__name__: f for f in (torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule, torch_chunk_kda, torch_recurrent_kda)}
_OURS.update(chunk_kimi_delta_attention=torch_chunk_kda, recurrent_kimi_delta_attention=torch_recurrent_kda)
_RULES = tuple(_OURS)  # what tells the modules: other models have convolutions of these names with other arguments
_OURS.update(causal_conv1d_fn=causal_conv1d_fn, causal_conv1d_update=causal_conv1d_update, torch_causal_conv1d_update=causal_conv1d_update)


def _modules():
    for model in MODELS:
        name = f"transformers.models.{model}.modeling_{model}"
        if importlib.util.find_spec(f"transformers.models.{model}") is not None:
            importlib.import_module(name)
    return [m for name, m in list(sys.modules.items()) if "modeling_" in name and any(hasattr(m, f) for f in _RULES)]


def _on_cpu(theirs, ours):
    @functools.wraps(theirs)
    def function(query, *args, **kwargs):
        return (ours if query.device.type == "cpu" else theirs)(query, *args, **kwargs)

    function.gdn_replaces = theirs
    return function


def _is_known(value):
    """The package causal_conv1d has functions of the same names, whose first argument is called x."""
    name = getattr(value, "__name__", None)
    return callable(value) and (name in _RULES or name in _OURS and next(iter(inspect.signature(value).parameters), None) == "hidden_states")


def _replace(owner, change):
    """Passes each attribute of a module or layer that is one of the functions through `change`, and stores what comes back."""
    count = 0
    for name, value in list(vars(owner).items()):
        if _is_known(value):
            new = change(value)
            if new is not value:
                setattr(owner, name, new)
                count += 1
    return count


def _patched(function):
    return function if hasattr(function, "gdn_replaces") else _on_cpu(function, _OURS[function.__name__])


def _unpatched(function):
    return getattr(function, "gdn_replaces", function)


def patch_transformers(model=None):
    """Makes the Gated DeltaNet and Kimi Delta Attention layers of transformers (Qwen3-Next, Qwen3.5, OLMo-Hybrid, Kimi-Linear, GLM-5-Next, and
    others already imported that define the same functions) compute with libgdn where the tensors are on the CPU. Elsewhere they compute as before.

    Call it before the model is made, or give the model: older versions of transformers (4.57) keep the functions in each layer.

    Returns the number of functions replaced; 0 the second time.
    """
    return sum(_replace(m, _patched) for m in _owners(model))


def unpatch_transformers(model=None):
    """Puts back what ``patch_transformers`` replaced. Returns the number of functions."""
    return sum(_replace(m, _unpatched) for m in _owners(model))


def _owners(model):
    return _modules() + ([] if model is None else list(model.modules()))
