"""The check and the benchmark for Ascend hardware, see docs/hardware.md. Writes one JSON file."""

import argparse
import json
import statistics
import time

import torch
import torch_npu  # noqa: F401

import gdn
from gdn import env

bf16 = torch.bfloat16


def inputs(kda, T, H, HV, K=128, V=128, B=1, N=None, decay=1.0, seed=0):
    torch.manual_seed(seed)
    normal = torch.nn.functional.normalize
    x = {"q": normal(torch.randn(B, T, H, K), dim=-1).to(bf16), "k": normal(torch.randn(B, T, H, K), dim=-1).to(bf16),
         "v": torch.randn(B, T, HV, V).to(bf16), "g": -decay * (torch.rand(B, T, HV, K) if kda else torch.rand(B, T, HV)),
         "beta": torch.rand(B, T, HV), "initial_state": torch.randn(N or B, HV, K, V)}
    return x


def cases():
    """(name, function, tensors, keywords, whether to go backward)"""
    gdn_, kda = gdn.chunk_gated_delta_rule, gdn.chunk_kda
    for T in (1, 64, 200):
        yield f"gdn T={T}", gdn_, inputs(False, T, 2, 4), {}, True
        yield f"kda T={T}", kda, inputs(True, T, 2, 4), {}, False
    for r in range(1, 16):
        yield f"tail gdn {r}", gdn_, inputs(False, 64 + r, 1, 2), {}, True
        yield f"tail kda {r}", kda, inputs(True, 64 + r, 1, 2), {}, False
    for cu in ([0, 30, 30, 95], [0, 64, 128], [0, 1, 2, 70]):
        packed = {"cu_seqlens": torch.tensor(cu)}
        yield f"packed gdn {cu}", gdn_, inputs(False, cu[-1] + 3, 1, 2, N=3 if len(cu) == 4 else 2), packed, True
        yield f"packed kda {cu}", kda, inputs(True, cu[-1] + 3, 1, 2, N=3 if len(cu) == 4 else 2), packed, False
    for decay in (0.0, 5.0, 20.0):
        yield f"decay gdn {decay}", gdn_, inputs(False, 130, 2, 2, decay=decay), {}, True
        yield f"decay kda {decay}", kda, inputs(True, 130, 2, 2, decay=decay), {}, False
    yield "V=256", gdn_, inputs(False, 100, 1, 2, V=256), {}, True
    fused = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    yield "gdn with norm and sigmoid", gdn_, inputs(False, 100, 2, 4), fused, True
    bounded = {**fused, "use_gate_in_kernel": True, "lower_bound": -5.0, "safe_gate": True}
    x = inputs(True, 100, 2, 4)
    x["g"] = torch.randn_like(x["g"])
    yield "kda with everything in the kernel", kda, {**x, "A_log": torch.rand(4), "dt_bias": torch.randn(4 * 128)}, bounded, True
    yield "step gdn", gdn.fused_recurrent_gated_delta_rule, inputs(False, 3, 2, 4), {}, False
    yield "step kda", gdn.fused_recurrent_kda, inputs(True, 3, 2, 4), {}, False


def run(function, x, keywords, backward, device):
    x = {name: t.detach().clone().to(device).requires_grad_(backward) for name, t in x.items()}
    with torch.set_grad_enabled(backward):
        o, state = function(**x, output_final_state=not backward, **keywords)
        if backward:
            torch.manual_seed(1)
            o.backward(torch.randn(o.shape).to(o.dtype).to(device))
    results = {"o": o} | ({} if state is None else {"final_state": state}) | ({"d" + n: t.grad for n, t in x.items()} if backward else {})
    return {name: t.detach().cpu().double() for name, t in results.items()}


def check(device, stream=None):
    for name, function, x, keywords, backward in cases():
        case = {"case": name, "device": device, "stream": "side" if stream else "default"}
        try:
            with torch.npu.stream(stream or torch.npu.current_stream(torch.device(device))):
                got = run(function, x, keywords, backward, device)
            want = run(function, x, keywords, backward, "cpu")
            case["errors"] = {n: ((got[n] - want[n]).norm() / want[n].norm().clamp(min=1e-20)).item() for n in want}
            case["right"] = all(e <= 2e-2 for e in case["errors"].values())
        except NotImplementedError as error:
            case["refused"] = str(error)
        except Exception as error:  # whatever it is belongs into the file
            case["failed"] = f"{type(error).__name__}: {error}"
        yield case


def bench(device):
    for kda, function in (False, gdn.chunk_gated_delta_rule), (True, gdn.chunk_kda):
        for T, heads in ((512, 16), (4096, 16), (4096, 32)):
            x = {name: t.to(device) for name, t in inputs(kda, T, heads, heads).items()}
            row = {"row": f"{function.__name__} T={T} H={heads}"}
            try:
                function(**x)
                begin, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
                host, spans = [], []
                for _ in range(20):
                    torch.npu.synchronize()
                    at = time.perf_counter()
                    begin.record()
                    function(**x)
                    end.record()
                    host.append(time.perf_counter() - at)
                    torch.npu.synchronize()
                    spans.append(begin.elapsed_time(end))
                row |= {"device_us": statistics.median(spans) * 1e3, "host_us": statistics.median(host) * 1e6}
            except NotImplementedError as error:
                row["refused"] = str(error)
            yield row
    x = torch.empty(1, 4096, 32, 128, dtype=bf16, device=device)
    x.transpose(1, 2).contiguous()
    begin, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
    torch.npu.synchronize()
    begin.record()
    x.transpose(1, 2).contiguous()
    end.record()
    torch.npu.synchronize()
    yield {"row": "copy of one layout to the other, T=4096 H=32", "device_us": begin.elapsed_time(end) * 1e3}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--bench", action="store_true")
    args = parser.parse_args()
    results = []
    if args.bench:
        results += bench("npu:0")
    else:
        results += check("npu:0")
        results += check("npu:0", torch.npu.Stream())
        for d in range(1, min(2, torch.npu.device_count())):
            results += check(f"npu:{d}")
        counts = {what: sum(what in r for r in results) for what in ("refused", "failed")}
        right = sum(r.get("right", False) for r in results)
        print(f"{right} right, {sum('errors' in r for r in results) - right} wrong, {counts['failed']} failed, {counts['refused']} refused")
    with open(args.out, "w") as f:
        json.dump({"environment": env.collect(), "results": results}, f, indent=1)


if __name__ == "__main__":
    main()
