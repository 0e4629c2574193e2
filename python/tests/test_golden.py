"""Agreement with other projects' implementations, on values that they computed (testdata/README)."""

import os

import pytest
import torch

import gdn
from golden import read
from reference import error

TENSORS, CASES = read(os.path.join(os.path.dirname(__file__), "testdata", "golden_gdn.safetensors"))


def run(case, function):
    about = CASES[case]
    part = {kind: {n.split(".", 1)[1]: t for n, t in TENSORS.items() if n.startswith(f"{case}/{kind}.")} for kind in ("in", "out", "grad")}
    x = {("g" if n == "g_raw" else n): t.clone().requires_grad_(bool(part["grad"]) and t.is_floating_point())
         for n, t in part["in"].items() if n not in ("do", "dht")}
    o, ht = function(**x, scale=about["scale"], use_qk_l2norm_in_kernel=about["l2norm"],
                     use_gate_in_kernel=about.get("gate_in_kernel", False), output_final_state=True)
    return part, x, o, ht


@pytest.mark.parametrize("function", [gdn.chunk_gated_delta_rule, gdn.fused_recurrent_gated_delta_rule])
@pytest.mark.parametrize("case", sorted(case for case in CASES if not case.startswith("fla_triton")))
def test_float32(case, function):
    part, x, o, ht = run(case, function)
    assert error(part["out"]["o"], o) <= 2e-6
    assert error(part["out"]["final_state"], ht) <= 2e-6
    loss = (o * part["in"]["do"]).sum() + (ht * part["in"]["dht"]).sum()
    names = {("g" if n == "g_raw" else n): n for n in part["grad"]}
    for n, gradient in zip(names, torch.autograd.grad(loss, [x[n] for n in names])):
        assert error(part["grad"][names[n]], gradient) <= 2e-5, n


@pytest.mark.parametrize("function", [gdn.chunk_gated_delta_rule, gdn.fused_recurrent_gated_delta_rule])
def test_bfloat16_of_a_gpu(function):
    part, _, o, ht = run("fla_triton_gdn_bf16_varlen", function)
    assert error(part["out"]["o"], o) <= 5e-3
    assert error(part["out"]["final_state"], ht) <= 5e-3
