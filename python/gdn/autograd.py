"""Which backward belongs to which forward, what is saved, and in which dtypes gradients come back."""

import torch
from torch.autograd import forward_ad

from . import _lib, library

# The keys of a call that goes from Autograd straight to the CPU: no mode, transform or tensor subclass wants to see it on the way.
_STRAIGHT = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU).add(torch._C.DispatchKey.AutogradCPU)

# forward: (backward, {its upstream gradient: the output it belongs to})
PAIRS = {
    "fwd": ("bwd", {"dout": "o", "dht": "final_state"}),
    "recurrent_fwd": ("recurrent_bwd", {"dout": "o", "dht": "final_state"}),
    "summary_fwd": ("summary_grad", {"dmap": "map"}),
    "kda_summary_fwd": ("kda_summary_grad", {"dmap": "map"}),
    "summary_merge": ("summary_merge_bwd", {"dout": "out"}),
    "summary_compose": ("summary_compose_bwd", {"dmap": "map"}),
    "kda_fwd": ("kda_bwd", {"dout": "o", "dht": "final_state"}),
    "kda_recurrent_fwd": ("kda_recurrent_bwd", {"dout": "o", "dht": "final_state"}),
    "gate_fwd": ("gate_bwd", {"dout": "y"}),
    "norm_fwd": ("norm_bwd", {"dout": "y"}),
    "conv_fwd": ("conv_bwd", {"dout": "y", "dht": "final_state"}),
    "frame_fwd": ("frame_bwd", {"dS": "S", "dz": "z", "dfinal_state": "final_state", "dfinal_z": "final_z"}),
    "frame_summary_fwd": ("frame_summary_bwd", {"dh": "h", "dM": "M", "dhz": "hz", "dMz": "Mz"}),
    "frame_merge_fwd": ("frame_merge_bwd", {"dS": "S", "dz": "z"}),
    "frame_build_fwd": ("frame_build_bwd", {"dW": "W", "dU": "U", "dWz": "Wz", "duz": "uz"}),
    "frame_project_fwd": ("frame_project_bwd", {"dnum": "num", "dden": "den"}),
}

# forward: {an input that the backward needs only where this output has 16 bits: that output}
SPARED = {"frame_fwd": {"U": "S", "uz": "z"}}


def define():
    for name, (backward, upstream) in PAIRS.items():
        library.implement_autograd(name, _differentiable(_lib.OPS[name].row, _lib.OPS[backward].row, upstream))
        library.implement_autograd(backward, _once(_lib.OPS[backward].row))
    for name, op in _lib.OPS.items():
        if library.mutated(op.row):
            library.implement_mutation(name)
            library.implement_autograd(name, _in_place(op.row))


def _differentiable(row, backward_row, upstream):
    """The Autograd kernel of a forward: without a gradient to come it is the operator itself, with one it also saves the tape, if it has one,
    and other results that the backward takes."""
    op, backward_op = library.operator(row["name"]), library.operator(backward_row["name"])
    names = [t["name"] for t in library.inputs(row)]
    n_inputs, n_numbers = len(names), len(row["numbers"])
    results = [t["name"] for t in library.outputs(row)]
    tape = results.index("tape") if "tape" in results else None
    save = n_inputs + n_numbers + library.wants(row).index("save") if tape is not None else None
    # The output of the backward by the input that it is the gradient of: [(position in the outputs, position of the input)].
    gradients = [(i, names.index(t["name"][1:] if t["name"][1:] in names else t["with"] or t["like"]))
                 for i, t in enumerate(library.outputs(backward_row))]
    # What the backward takes, by position: ("saved", i) from the forward's inputs and then its results, ("grad", i) of the forward's outputs.
    kept = [i for i, name in enumerate(results) if name in [t["name"] for t in library.inputs(backward_row)] and name not in names]
    saved_names = names + [results[i] for i in kept]
    takes = [("grad", results.index(upstream[t["name"]]), t["role"]) if t["name"] in upstream else
             ("saved", saved_names.index(t["name"]), t["role"]) for t in library.inputs(backward_row)]
    spared = [(names.index(i), results.index(o)) for i, o in SPARED.get(row["name"], {}).items()]

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, keyset, *arguments):
            if tape is not None:
                arguments = arguments[:save] + (True,) + arguments[save + 1:]
            made = library.below_autograd(op, keyset, arguments)
            made = made if isinstance(made, tuple) else (made,)  # an operator with one output returns it bare
            inputs = list(arguments[:n_inputs])
            ctx.dtypes = [None if t is None else t.dtype for t in inputs]
            for i, other in spared:
                if made[other].element_size() > 2:
                    inputs[i] = None
            ctx.save_for_backward(*inputs, *(made[i] if made[i].dim() > 1 or results[i] == "tape" else None for i in kept))
            ctx.numbers = arguments[n_inputs:n_inputs + n_numbers]
            ctx.shapes = [m.shape for m in made]
            ctx.mark_non_differentiable(*(m for name, m in zip(results, made) if name not in upstream.values()))
            ctx.set_materialize_grads(False)
            return made if len(made) > 1 else made[0]

        @staticmethod
        def backward(ctx, *grads):
            if all(g is None for g in grads):
                return (None,) * len(ctx.needs_input_grad)
            saved = ctx.saved_tensors
            given = []
            for kind, i, role in takes:
                if kind == "saved":
                    given.append(saved[i])
                elif grads[i] is not None and grads[i].dim() > 1:
                    given.append(grads[i])
                else:  # undefined, or that of an output that was not asked for
                    given.append(saved[0].new_zeros(()).expand(ctx.shapes[i]) if role == "in" else None)
            made = backward_op(*given, *ctx.numbers)
            answer = [None] * len(ctx.needs_input_grad)
            for i, position in gradients:
                if ctx.needs_input_grad[position + 1]:
                    answer[position + 1] = made[i].to(ctx.dtypes[position])
            return tuple(answer)

    Function.__name__ = Function.__qualname__ = f"gdn_{row['name']}"

    def differentiable(keyset, *arguments):
        _refuse_transforms(row)
        return Function.apply(keyset, *arguments)

    def plain(keyset, *arguments):
        if forward_ad._current_level >= 0:
            _refuse_tangents(row, arguments[:n_inputs])
        return library.below_autograd(op, keyset, arguments)

    # The straight way to the CPU is 5 us shorter than the one by the dispatcher.
    variants = library.on_cpu[row["name"]]
    given = ", ".join(library.parameters(row))
    return library.compiled("kernel", [
        f"def kernel(keyset, {given}):",
        f"    if is_grad_enabled() and ({_needed(row)}):",
        f"        return differentiable(keyset, {given})",
        "    if keyset == straight and forward_ad._current_level < 0:",
        f"        return {variants.call}",
        f"    return plain(keyset, {given})",
    ], is_grad_enabled=torch.is_grad_enabled, differentiable=differentiable, straight=_STRAIGHT, forward_ad=forward_ad, variants=variants,
        plain=plain)


def _needed(row):
    """An expression that tells whether an input requires its gradient."""
    return " or ".join(f"{t['name']}.requires_grad" if t["role"] != "opt_in" else f"{t['name']} is not None and {t['name']}.requires_grad"
                       for t in library.inputs(row))


def _refuse_transforms(row):
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(f"gdn::{row['name']} has no gradient under the transforms of torch.func; use backward() or torch.autograd.grad")


def _refuse_tangents(row, tensors):
    """Forward-mode differentiation would find tangents of zero, silently."""
    if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise RuntimeError(f"gdn::{row['name']} has no forward-mode derivative; use backward() or torch.autograd.grad")


def _once(row):
    """The Autograd kernel of a backward, which has no gradient of its own: asking for one raises."""
    op = library.operator(row["name"])

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, keyset, *arguments):
            return library.below_autograd(op, keyset, arguments)

        @staticmethod
        def backward(ctx, *grads):
            raise RuntimeError(f"gdn::{row['name']} is a gradient already and has none of its own: double backward is not supported")

    Function.__name__ = Function.__qualname__ = f"gdn_{row['name']}"

    def kernel(keyset, *arguments):
        if torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in arguments):
            return Function.apply(keyset, *arguments)
        return library.below_autograd(op, keyset, arguments)

    return kernel


def _in_place(row):
    """The Autograd kernel of an operator that updates a tensor in place, for inference: it has no gradient, and asking for one raises."""
    op, changed = library.operator(row["name"]), library.mutated(row)
    positions = [i for i, t in enumerate(library.inputs(row)) if t["name"] in changed]

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, keyset, *arguments):
            return library.below_autograd(op, keyset, arguments)

        @staticmethod
        def backward(ctx, *grads):
            raise RuntimeError(f"gdn::{row['name']} is for inference and has no gradient: it overwrites the states that one would need")

    Function.__name__ = Function.__qualname__ = f"gdn_{row['name']}"

    def with_gradient(keyset, *arguments):
        for i in positions:
            if arguments[i].requires_grad:
                raise RuntimeError(f"gdn::{row['name']} updates {library.inputs(row)[i]['name']} in place, which requires its gradient")
        return Function.apply(keyset, *arguments)

    def plain(keyset, *arguments):
        return library.below_autograd(op, keyset, arguments)

    variants, given = library.on_cpu[row["name"]], ", ".join(library.parameters(row))
    return library.compiled("kernel", [
        f"def kernel(keyset, {given}):",
        f"    if is_grad_enabled() and ({_needed(row)}):",
        f"        return with_gradient(keyset, {given})",
        "    if keyset == straight:",
        *(f"        increment_version({name})" for name in changed),
        f"        return {variants.call}",
        f"    return plain(keyset, {given})",
    ], is_grad_enabled=torch.is_grad_enabled, with_gradient=with_gradient, straight=_STRAIGHT.add(torch._C.DispatchKey.ADInplaceOrView),
        increment_version=torch.autograd.graph.increment_version, variants=variants, plain=plain)


define()
