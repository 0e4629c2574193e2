"""Runs a public function and the reference on the same tensors; the reference, where it would take long, on some heads and batches only."""

import os
import subprocess
import sys

import torch

import reference

# The differentiable arguments of the public functions, with the names of their gradients.
GRADIENTS = {"q": "dq", "k": "dk", "v": "dv", "g": "dg", "gk": "dgk", "gv": "dgv", "beta": "dbeta", "A_log": "dA_log",
             "dt_bias": "ddt_bias", "initial_state": "dh0"}

# Where the heads are, by name: (dimension, whether they are the value heads).
_HEADS = {**dict.fromkeys(("q", "k", "dq", "dk"), (2, False)),
          **dict.fromkeys(("v", "g", "gk", "gv", "beta", "o", "do", "dv", "dg", "dgk", "dgv", "dbeta"), (2, True)),
          **dict.fromkeys(("initial_state", "ht", "dht", "dh0"), (1, True)),
          **dict.fromkeys(("A_log", "dt_bias", "dA_log", "ddt_bias"), (0, True))}


def upstream(tensors, sequences=None):
    """do and dht for a call, standard normal."""
    v = tensors["v"]
    N = v.shape[0] if sequences is None else sequences
    state = torch.float64 if v.dtype == torch.float64 else torch.float32
    return torch.randn_like(v), torch.randn(N, v.shape[2], tensors["q"].shape[3], v.shape[3], dtype=state)


def run(function, tensors, options, do=None, dht=None):
    """{"o", "ht", "dq", ...} of a call; the gradients are those of sum(o do) + sum(ht dht), where at least one of the two is given."""
    if do is None and dht is None:
        with torch.no_grad():
            o, ht = function(**tensors, **options)
        return {"o": o, "ht": ht}
    leaves = {name: t.detach().requires_grad_() for name, t in tensors.items() if name in GRADIENTS and t is not None}
    o, ht = function(**{**tensors, **leaves}, **options)
    pairs = [(out, up.to(out.dtype)) for out, up in ((o, do), (ht, dht)) if up is not None]
    gradients = torch.autograd.grad([out for out, _ in pairs], list(leaves.values()), [up for _, up in pairs], materialize_grads=True)
    return {"o": o.detach(), "ht": None if ht is None else ht.detach(), **{GRADIENTS[n]: d for n, d in zip(leaves, gradients)}}


def expected(tensors, options, do=None, dht=None, heads=None, batches=None):
    """As `run` of the reference, in float64."""
    sizes = tensors["q"].shape[2], tensors["v"].shape[2]
    tensors = part({name: t for name, t in tensors.items() if t is not None}, *sizes, heads, batches)
    tensors = {name: t.double() if name in GRADIENTS else t for name, t in tensors.items()}
    ups = part({name: up for name, up in (("do", do), ("dht", dht)) if up is not None}, *sizes, heads, batches)
    options = {name: value for name, value in options.items() if name not in ("output_final_state", "chunk_size")}
    return run(reference.delta_rule, tensors, options, **ups)


def part(tensors, H, HV, heads, batches):
    """The slices of some key heads, with their value heads, and batches."""
    chosen = {}
    for name, t in tensors.items():
        if name in _HEADS:
            dim, value = _HEADS[name]
            if heads is not None:
                group = HV // H if value else 1
                t = t.index_select(dim, torch.tensor([h * group + i for h in heads for i in range(group)]))
            if batches is not None and dim > 0:
                t = t[list(batches)]
        chosen[name] = t
    return chosen


def check(function, tensors, options, do=None, dht=None, heads=None, batches=None):
    """Runs the call whole, the reference on the given heads and batches (which must be all where A_log or dt_bias has a gradient, a sum over
    them), and compares every output and gradient. Returns those of the call."""
    found = run(function, tensors, options, do, dht)
    want = expected(tensors, options, do, dht, heads, batches)
    there = {name: t for name, t in found.items() if t is not None}
    assert {"o", *(["dq", "dk", "dv"] if do is not None else [])} <= set(there)
    for name, t in part(there, tensors["q"].shape[2], tensors["v"].shape[2], heads, batches).items():
        reference.check(name, want[name], t)
    return found


def same(first, second):
    """Holds two results of `run` to be equal in every bit."""
    assert set(first) == set(second)
    for name, t in first.items():
        assert t.dtype == second[name].dtype and torch.equal(t, second[name]), f"{name} differs"


def child(code, *arguments, timeout=60, status=0, **variables):
    """Runs code in a Python process of its own, with environment variables set or (None) unset, and holds it to an exit status."""
    package = os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir)
    environment = {**os.environ, "PYTHONPATH": package, **variables}
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL,
                          env={name: value for name, value in environment.items() if value is not None})
    assert done.returncode == status, f"exit status {done.returncode}, expected {status}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done
