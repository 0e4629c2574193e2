"""gdn's operators on torch_npu's tensors: equal to those on the CPU within what bfloat16 between the steps costs."""

import json
import subprocess
import sys
import threading

import pytest
import torch

import fake
import gdn
from gdn import _lib
from test_torch_npu import drained, elsewhere  # noqa: F401  a fixture

import torch_npu  # noqa: F401

bf16 = torch.bfloat16
COARSE = 2e-2


def near(got, want, name):
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    assert got.shape == want.shape and not got.isnan().any(), name
    error = (got - want).norm() / want.norm().clamp(min=1e-20)
    assert error <= COARSE, f"{name}: {error.item()}"


def inputs(T=70, H=1, HV=2, K=128, V=128, B=1, N=None, kda=False, seed=0, dtype=bf16):
    torch.manual_seed(seed)
    normal = torch.nn.functional.normalize
    x = {"q": normal(torch.randn(B, T, H, K), dim=-1), "k": normal(torch.randn(B, T, H, K), dim=-1), "v": torch.randn(B, T, HV, V)}
    x = {name: t.to(dtype) for name, t in x.items()}
    x["g"] = -torch.rand(B, T, HV, K) if kda else -torch.rand(B, T, HV)
    x["beta"] = torch.rand(B, T, HV)
    x["initial_state"] = torch.randn(N or B, HV, K, V)
    return x


def both(function, x, device="npu", upstream=("o",), wrap=None, output_final_state=True, **keywords):
    """Runs forward and backward on the CPU and on the device and compares everything."""
    results = []
    for where in "cpu", device:
        tensors = {name: t.detach().clone().to(where).requires_grad_() for name, t in x.items()}
        call = wrap(function) if wrap and where != "cpu" else function
        o, last = call(**tensors, output_final_state=output_final_state, **keywords)
        torch.manual_seed(1)
        loss = (o.float() * torch.randn(o.shape).to(where)).sum()
        if "final_state" in upstream:
            loss = loss + (last * torch.randn(last.shape).to(where)).sum()
        if upstream:
            loss.backward()
        results.append({"o": o} | ({"final_state": last} if output_final_state else {}) | ({"d" + name: t.grad for name, t in tensors.items()} if upstream else {}))
    for name, want in results[0].items():
        assert results[1][name].device.type == "npu"
        near(results[1][name], want, name)


# ---- what A2 has: forward and backward of GDN in stages, forward of KDA ----

@pytest.mark.parametrize("T, H, HV, B", [(1, 1, 1, 1), (70, 1, 2, 2), (129, 2, 2, 1)])
def test_gdn(T, H, HV, B):
    both(gdn.chunk_gated_delta_rule, inputs(T=T, H=H, HV=HV, B=B), upstream=("o", "final_state"))


def test_gdn_packed():
    for cu in [0, 30, 30, 95], [0, 64, 128]:
        x = inputs(T=cu[-1] + 3, N=len(cu) - 1)
        both(gdn.chunk_gated_delta_rule, x, upstream=("o", "final_state"), cu_seqlens=torch.tensor(cu))
    # Offsets may lie on the device, too.
    on = {name: t.npu() for name, t in x.items()}
    o, _ = gdn.chunk_gated_delta_rule(**on, cu_seqlens=torch.tensor(cu).npu())
    near(o, gdn.chunk_gated_delta_rule(**x, cu_seqlens=torch.tensor(cu))[0], "o")


def test_inference_and_decoding():
    with torch.no_grad():
        both(gdn.chunk_gated_delta_rule, inputs(), upstream=())
        both(gdn.fused_recurrent_gated_delta_rule, inputs(T=3, K=64, V=32), upstream=())
        both(gdn.chunk_kda, inputs(kda=True), upstream=())
        both(gdn.fused_recurrent_kda, inputs(T=2, kda=True), upstream=())


def test_side_stream():
    """The operators run on the current stream: what comes before them there they see, and what follows sees them."""
    x = {name: t.npu() for name, t in inputs().items()}
    want = gdn.chunk_gated_delta_rule(**inputs())[0]
    side = torch.npu.Stream()
    side.wait_stream(torch.npu.current_stream())
    fake.acl.gdnfake_delay(2000)
    with torch.npu.stream(side):
        doubled = x["v"] * 2
        o, _ = gdn.chunk_gated_delta_rule(**{**x, "v": doubled, "initial_state": x["initial_state"] * 2})
        halved = o / 2
    torch.npu.current_stream().wait_stream(side)
    near(halved, want, "o")
    with torch.npu.stream(side):
        both(gdn.chunk_gated_delta_rule, inputs())


def test_devices():
    both(gdn.chunk_gated_delta_rule, inputs(), device="npu:1", upstream=("o", "final_state"))
    assert torch.npu.current_device() == 0
    with torch.npu.device(1):
        both(gdn.chunk_gated_delta_rule, inputs(), device="npu:0")
        assert torch.npu.current_device() == 1
    x = inputs()
    with pytest.raises(ValueError, match="k is on Ascend NPU:1, expected Ascend NPU:0 like q"):
        gdn.chunk_gated_delta_rule(**{name: t.to("npu:1" if name == "k" else "npu:0") for name, t in x.items()})
    with pytest.raises(ValueError, match="v is on CPU, expected Ascend NPU:0 like q"):
        gdn.chunk_gated_delta_rule(**{name: t.to("cpu" if name == "v" else "npu:0") for name, t in x.items()})


def test_strides_and_offsets():
    x = inputs(T=66)
    whole = torch.randn(1, 70, 1, 3, 128).to(bf16).npu()
    on = {name: t.npu() for name, t in x.items()}
    fused = {**on, "q": whole[:, 3:69, :, 0], "k": whole[:, 3:69, :, 2], "g": on["g"].transpose(1, 2).contiguous().transpose(1, 2)}
    o, _ = gdn.chunk_gated_delta_rule(**fused)
    near(o, gdn.chunk_gated_delta_rule(**{name: t.cpu() for name, t in fused.items()})[0], "o")


def test_refusals():
    on = {name: t.npu() for name, t in inputs(dtype=torch.float32).items()}
    with pytest.raises(NotImplementedError, match="q is float32, and it takes bfloat16 or float16"):
        gdn.chunk_gated_delta_rule(**on)
    on = {name: t.npu() for name, t in inputs(K=64).items()}
    with pytest.raises(NotImplementedError, match=r"gdn_fwd: no way to run this on Ascend NPU:0 \(Ascend910B2, CANN 9.0.0\).*K is 64"):
        gdn.chunk_gated_delta_rule(**on)
    with pytest.raises(ValueError, match="gdn_fwd: q has"):
        torch.ops.gdn.fwd(*[t.npu() for t in (torch.ones(3, dtype=bf16),) * 3], *(None,) * 6, 0.0, *(False,) * 7)


def test_path():
    op = _lib.OPS["fwd"]
    from gdn.library import view
    x = [t.npu() for t in inputs().values()]
    o = torch.empty(1, 70, 2, 128, dtype=bf16, device="npu")
    views = [view(t) for t in x[:5]] + [None, None, view(x[5]), None, view(o), None, None]
    assert op.supports(views, (0.0, 0, 0, 0, 0, 0)) == "ascend, aclnnChunkGatedDeltaRuleFwd of fla-npu, CANN 9.0.0 on Ascend910B2"


def test_failures_have_the_words_of_cann():
    x = {name: t.npu() for name, t in inputs().items()}
    torch.npu.synchronize()
    fake.acl.gdnfake_fail(b"aclnnChunkGatedDeltaRuleFwd", 1, 507035, b"the vector core is on strike")
    with pytest.raises(RuntimeError, match="gdn_fwd: aclnnChunkGatedDeltaRuleFwd failed with status 507035, exception of a vector core: the vector core is on strike"):
        gdn.chunk_gated_delta_rule(**x)
    o, _ = gdn.chunk_gated_delta_rule(**x)
    near(o, gdn.chunk_gated_delta_rule(**inputs())[0], "o")


def test_memory_comes_from_the_caching_allocator():
    x = {name: t.npu() for name, t in inputs().items()}
    gdn.chunk_gated_delta_rule(**x)
    torch.npu.synchronize()
    used = torch.npu.memory_allocated()
    torch.npu.reset_peak_memory_stats()
    o, _ = gdn.chunk_gated_delta_rule(**x)
    assert torch.npu.max_memory_allocated() > used + o.numel() * 2  # more than the output: the workspace
    del o
    torch.npu.synchronize()
    assert torch.npu.memory_allocated() == used
    assert _lib.library().gdn_trim() == 0


def test_threads():
    """Each thread has a stream of its own."""
    there, errors = inputs(), []
    want = gdn.chunk_gated_delta_rule(**there)[0]

    def work(n):
        try:
            torch.npu.set_device(n % 2)
            with torch.npu.stream(torch.npu.Stream()):
                x = {name: t.to(f"npu:{n % 2}") for name, t in there.items()}
                for _ in range(5):
                    o, _ = gdn.chunk_gated_delta_rule(**x)
                near(o, want, "o")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not errors, errors


def test_compiled():
    compiled = lambda f: torch.compile(f, backend="aot_eager", fullgraph=True)  # noqa: E731
    both(gdn.chunk_gated_delta_rule, inputs(), upstream=("o", "final_state"), wrap=compiled)


def test_checkpointed():
    def checkpointed(f):
        return lambda **x: torch.utils.checkpoint.checkpoint(lambda: f(**x), use_reentrant=False)
    both(gdn.chunk_gated_delta_rule, inputs(), wrap=checkpointed)


@pytest.mark.parametrize("queue", ["0", "1", "2"])
def test_task_queue(queue):
    """With torch_npu's task queue the operators wait for what stands in it."""
    elsewhere("""
import test_gdn as t
fake.acl.gdnfake_delay(500)
t.both(t.gdn.chunk_gated_delta_rule, t.inputs(), upstream=("o", "final_state"))
x = {name: y.npu() for name, y in t.inputs().items()}
for _ in range(20):
    x["v"] = x["v"] + 1
o, _ = t.gdn.chunk_gated_delta_rule(**x)
t.near(o, t.gdn.chunk_gated_delta_rule(**{name: y.cpu() for name, y in x.items()})[0], "o")
torch.npu.synchronize()
""", TASK_QUEUE_ENABLE=queue)


# ---- what A5 has: composites and the backward of KDA, in processes of their own, for a chip is for life ----

A5 = "fake.acl.gdnfake_soc(b'Ascend950PR_9599')\nimport test_gdn as t\n"


def test_gdn_on_a5():
    elsewhere(A5 + """
for fused in {}, {"use_qk_l2norm_in_kernel": True}, {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}:
    t.both(t.gdn.chunk_gated_delta_rule, t.inputs(T=66, H=2, HV=4), upstream=("o", "final_state"), **fused)
t.both(t.gdn.chunk_gated_delta_rule, t.inputs(T=99, N=3), upstream=("o", "final_state"), cu_seqlens=torch.tensor([0, 30, 30, 95]))
""")


def kda_gate(seed=0):
    torch.manual_seed(seed)
    return {"A_log": torch.rand(2), "dt_bias": torch.randn(2 * 128)}


def test_kda_on_a5():
    elsewhere(A5 + """
gate = {"use_gate_in_kernel": True, "lower_bound": -5.0, "safe_gate": True}
for packed in {}, {"cu_seqlens": torch.tensor([0, 30, 30, 70])}:
    x = t.inputs(kda=True, N=3 if packed else None) | t.kda_gate()
    x["g"] = torch.randn_like(x["g"])
    t.both(t.gdn.chunk_kda, x, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, **gate, **packed)
    # A compiled graph has a gradient for each output, be it zero; and that of the state is what A5 cannot do.
    t.both(t.gdn.chunk_kda, x, use_qk_l2norm_in_kernel=True, output_final_state=False,
           wrap=lambda f: torch.compile(f, backend="aot_eager", fullgraph=True), **gate, **packed)
""")


def test_training_on_a5():
    """A few steps of a model with a layer of each kind, its projections on the CPU: the losses are those of the CPU alone."""
    elsewhere(A5 + """
def train(where):
    torch.manual_seed(0)
    D, HV = 128, 2
    w = [torch.nn.Parameter(torch.randn(64, HV * D * 3) / 8) for _ in range(2)] + [torch.nn.Parameter(torch.randn(HV * D, 64) / 16) for _ in range(2)]
    gates = [torch.nn.Parameter(torch.randn(64, HV) / 8), torch.nn.Parameter(torch.randn(64, HV * D) / 8)]
    betas = [torch.nn.Parameter(torch.randn(64, HV) / 8) for _ in range(2)]
    A_log, bias = torch.nn.Parameter(torch.zeros(HV)), torch.nn.Parameter(torch.zeros(HV * D))
    optimizer = torch.optim.SGD(w + gates + betas + [A_log, bias], lr=0.05)
    x, y = torch.randn(1, 70, 64), torch.randn(1, 70, 64)
    losses = []
    for _ in range(4):
        h = x
        for i, f in enumerate((t.gdn.chunk_gated_delta_rule, t.gdn.chunk_kda)):
            q, k, v = ((h @ w[i]).view(1, 70, 3, HV, D)[:, :, j].to(torch.bfloat16).to(where) for j in range(3))
            beta = (h @ betas[i]).to(where)
            if i == 0:
                o, _ = f(q, k, v, torch.nn.functional.logsigmoid(h @ gates[0]).to(where), beta, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True)
            else:
                o, _ = f(q, k, v, (h @ gates[1]).view(1, 70, HV, D).to(where), beta, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True,
                         use_gate_in_kernel=True, A_log=A_log.to(where), dt_bias=bias.to(where), lower_bound=-5.0, safe_gate=True)
            h = h + o.cpu().float().reshape(1, 70, -1) @ w[2 + i]
        loss = ((h - y) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
want, got = train("cpu"), train("npu")
assert want[-1] < want[0] and all(abs(a - b) <= 0.01 * abs(a) for a, b in zip(want, got)), (want, got)
""")


# ---- installations ----

def python(code, **environment):
    import os
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env={**os.environ, **environment})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_import_order():
    for first, then in ("gdn", "torch_npu"), ("torch_npu", "gdn"):
        python(f"import torch, {first}, {then}\nimport gdn, sys\nassert not gdn._lib.loaded()\n"
               "x = torch.ones(1, 2, 1, 128, dtype=torch.bfloat16).npu()\nassert gdn.chunk_gated_delta_rule(x, x, x)[0].shape == x.shape")


def test_cpu_users_load_no_cann():
    """Not even where torch_npu is installed and CANN is there."""
    python("import torch, gdn\nx = torch.ones(1, 2, 1, 8)\ngdn.chunk_gated_delta_rule(x, x, x)\n"
           "maps = open('/proc/self/maps').read()\nassert 'libascendcl' not in maps and 'libcust_opapi' not in maps and 'libgdn.so' in maps")


def test_torch_npu_without_cann():
    """torch_npu does not start; gdn on CPU tensors does not mind."""
    python("import torch\ntry:\n import torch_npu\n raise SystemExit('it did')\nexcept (ImportError, OSError): pass\nimport gdn\n"
           "x = torch.ones(1, 2, 1, 8)\ngdn.chunk_gated_delta_rule(x, x, x)", LD_LIBRARY_PATH="", ASCEND_HOME_PATH="/nowhere")


def test_report():
    facts = json.loads(python("import runpy, sys\nsys.argv = ['gdn.env', '--json']\nrunpy.run_module('gdn.env', run_name='__main__')"))
    assert facts["torch-npu"].startswith("2.") and "CANN 9.0.0, " in facts["ascend"]
    assert "gdn_fwd by aclnnChunkGatedDeltaRuleFwd of fla-npu: present" in facts["ascend"] and "2.9.0.post9" in facts["npu tested"]
