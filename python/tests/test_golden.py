"""Agreement with other projects' implementations, on values that they computed (testdata/README)."""

import os

import pytest
import torch

import gdn
from golden import read
from reference import error

TENSORS, CASES = {}, {}
for family in ("gdn", "kda"):
    for all_of, some in zip((TENSORS, CASES), read(os.path.join(os.path.dirname(__file__), "testdata", f"golden_{family}.safetensors"))):
        all_of.update(some)

FUNCTIONS = {"gdn": [gdn.chunk_gated_delta_rule, gdn.fused_recurrent_gated_delta_rule], "kda": [gdn.chunk_kda, gdn.fused_recurrent_kda]}


def family_of(case):
    return "kda" if "kda" in case else "gdn"


def run(case, function):
    about = CASES[case]
    part = {kind: {n.split(".", 1)[1]: t for n, t in TENSORS.items() if n.startswith(f"{case}/{kind}.")} for kind in ("in", "out", "grad")}
    x = {("g" if n == "g_raw" else n): t.clone().requires_grad_(bool(part["grad"]) and t.is_floating_point())
         for n, t in part["in"].items() if n not in ("do", "dht")}
    bound = {} if about.get("lower_bound") is None else {"lower_bound": about["lower_bound"]}
    o, ht = function(**x, scale=about["scale"], use_qk_l2norm_in_kernel=about["l2norm"], use_gate_in_kernel="g_raw" in part["in"],
                     output_final_state=True, **bound)
    return part, x, o, ht


@pytest.mark.parametrize("case, function", [(case, function) for case in sorted(CASES) if not case.startswith("fla_triton")
                                            for function in FUNCTIONS[family_of(case)]])
def test_float32(case, function):
    part, x, o, ht = run(case, function)
    assert error(part["out"]["o"], o) <= 2e-6
    assert error(part["out"]["final_state"], ht) <= 2e-6
    loss = (o * part["in"]["do"]).sum() + (ht * part["in"]["dht"]).sum()
    names = {("g" if n == "g_raw" else n): n for n in part["grad"]}
    for n, gradient in zip(names, torch.autograd.grad(loss, [x[n] for n in names])):
        assert error(part["grad"][names[n]], gradient) <= 2e-5, n


@pytest.mark.parametrize("case, function", [(case, function) for case in sorted(CASES) if case.startswith("fla_triton")
                                            for function in FUNCTIONS[family_of(case)]])
def test_bfloat16_of_a_gpu(case, function):
    part, x, o, ht = run(case, function)
    assert error(part["out"]["o"], o) <= 5e-3
    assert error(part["out"]["final_state"], ht) <= 5e-3
    if not part["grad"]:
        return
    loss = (o * part["in"]["do"]).sum() + (ht * part["in"]["dht"]).sum()
    names = {("g" if n == "g_raw" else n): n for n in part["grad"]}
    for n, gradient in zip(names, torch.autograd.grad(loss, [x[n] for n in names])):
        # Theirs rounds its intermediates to bfloat16; the one number of A_log is a sum over all of them in which signs cancel.
        assert error(part["grad"][names[n]], gradient) <= (3e-2 if n == "A_log" else 1e-2), n
