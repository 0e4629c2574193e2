#!/usr/bin/env python3
"""Times the operators, beside what the machine can do and what other implementations need.

usage: make bench [ONLY=pattern]      rows whose name contains the pattern (shell wildcards allowed)

A row is measured in rounds: the machine's FMA peak, the library's operators, the same as a PyTorch user calls them, the peers, then again,
so that all see the same frequency and the same neighbours. The operators are timed on memory that is there (ms and what follows from
it); from PyTorch (torch_ms) they allocate their results, which by glibc's defaults is new memory for each tensor over 32 MB, and so do the
peers, whose ratio is to torch_ms. All figures are medians.

Rows of one thread run pinned to one core and count CPU time of the whole process, user and system, which other jobs on the core do not
lengthen; alone on a core it is the wall time. Rows of more threads count wall time, so the machine must be idle: a row for which the
process did not get its cores is marked as disturbed and has no ratios. The peak is always CPU time of one thread.

Results go to build/out/bench.json and bench.md, and with ARGS=--readme the rows of README.md's table there too. FLOPs are counted as 6 K V
per token and value head forward and 22 K V with backward, for frame GDN as 2 D^3 per frame and head forward and 6 D^3 with backward, whatever
the algorithm does, and a fraction is GFLOP/s by the FMA peak of one thread times the threads.
"""

import argparse
import ctypes
import dataclasses
import fnmatch
import gc
import inspect
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

import gdn
from gdn import _lib, library

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OUT = os.path.join(ROOT, "build", "out")
GIB = 2.0 ** 30


@dataclasses.dataclass
class Row:
    """What is timed; the name follows from it."""

    passes: str  # fwd, fwd+bwd, decode
    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    dtype: str = "float32"
    threads: int = 1
    l2norm: bool = False
    peer: bool = True
    memory: bool = False  # measure extra_gib too
    call: bool = False  # measure call_us too
    family: str = "gdn"  # or kda

    @property
    def name(self):
        op = self.family + ("-l2norm" if self.l2norm else "")
        return f"{op}/{self.passes}/{self.dtype}/B{self.B}.T{self.T}.H{self.H}.HV{self.HV}.K{self.K}.V{self.V}/t{self.threads}"

    @property
    def flops(self):
        return (22 if self.passes == "fwd+bwd" else 6) * self.K * self.V * self.B * self.T * self.HV

    def ours(self):
        return operation(self, **OURS[self.family])

    def peers(self):
        """Functions to compare with, by name."""
        peer = transformers_peer(self.family) if self.peer else None
        return {"transformers": operation(self, peer["chunk"], peer["recurrent"])} if peer else {}

    def alone(self):
        return alone(self)


@dataclasses.dataclass
class FrameRow:
    """A scan of frame GDN, numerator and denominator. Peers: the scan with cumulative products and a correction, as it is spread over ranks
    elsewhere (seed), and a loop over frames of torch.baddbmm."""

    passes: str  # fwd, fwd+bwd
    B: int
    T: int
    H: int
    D: int
    dtype: str = "float32"
    threads: int = 1
    memory = call = False

    @property
    def name(self):
        return f"frame/{self.passes}/{self.dtype}/B{self.B}.T{self.T}.H{self.H}.D{self.D}/t{self.threads}"

    @property
    def flops(self):
        return (6 if self.passes == "fwd+bwd" else 2) * self.D ** 3 * self.B * self.T * self.H

    def inputs(self):
        torch.manual_seed(0)
        tokens = 64  # a frame; their number does not matter to the scan
        k, v, kz = (torch.randn(self.B, self.T * tokens, self.H, self.D) * (self.D * tokens) ** -0.5 for _ in range(3))
        made = gdn.frame.build_transitions(k, v, torch.rand(self.B, self.T, self.H), 0.9 + 0.1 * torch.rand(self.B, self.T, self.H), kz)
        return [t.to(getattr(torch, self.dtype)) for t in made]

    def operation(self, scan):
        tensors = self.inputs()
        if self.passes == "fwd":

            def forward():
                with torch.no_grad():
                    return scan(*tensors)[:2]

            return forward
        for t in tensors:
            t.requires_grad_()
        upstream = [torch.randn_like(t) for t in tensors[1::2]]

        def both():
            results = scan(*tensors)[:2]
            return *(r.detach() for r in results), *torch.autograd.grad(results, tensors, upstream)

        return both

    def ours(self):
        return self.operation(gdn.frame.scan)

    def peers(self):
        # Frames by unbind: the gradient of W[:, t] would be a tensor of W's size for each t.
        def products(W, left):
            made = []
            for w in W.unbind(1):
                made.append(w if not made else w @ made[-1] if left else made[-1] @ w)
            return torch.stack(made, 1)

        def local(W, U, Wz, uz):
            S, z = torch.zeros_like(U[:, 0]), torch.zeros_like(uz[:, 0])
            states, zs = [], []
            for w, u, wz, x in zip(*(t.unbind(1) for t in (W, U, Wz, uz))):
                S = torch.matmul(S, w) + u
                z = torch.bmm(wz, z.unsqueeze(-1)).squeeze(-1) + x
                states.append(S)
                zs.append(z)
            return torch.stack(states, 1), torch.stack(zs, 1)

        def seed(W, U, Wz, uz):
            C, Cz = products(W, False), products(Wz, True)
            S, z = local(W, U, Wz, uz)
            start, start_z = torch.zeros_like(U[:, 0]), torch.zeros_like(uz[:, 0])
            return S + start.unsqueeze(1) @ C, z + (Cz @ start_z[:, None, :, None]).squeeze(-1)

        def baddbmm(W, U, Wz, uz):
            states, zs = [], []
            for w, u, wz, x in zip(*(t.unbind(1) for t in (W, U, Wz, uz.unsqueeze(-1)))):
                states.append(torch.baddbmm(u, states[-1], w) if states else u)
                zs.append(torch.baddbmm(x, wz, zs[-1]) if zs else x)
            return torch.stack(states, 1), torch.stack(zs, 1).squeeze(-1)

        return {"seed": self.operation(seed), "baddbmm": self.operation(baddbmm)}

    def alone(self):
        tensors = dict(zip(("W", "U", "Wz", "uz"), self.inputs()))
        keep, forward = prepared("frame_fwd", tensors, (0, False, False), (False, False))
        if self.passes == "fwd":
            return lambda: (forward(), keep)
        given = {n: keep[n] for n in ("W", "S", "Wz", "z")}
        held, backward = prepared("frame_bwd", {**given, "dS": torch.randn_like(keep["S"]), "dz": torch.randn_like(keep["z"])}, (0, False, False), ())
        return lambda: (forward(), backward(), keep, held)


@dataclasses.dataclass
class ConvRow:
    """The causal convolution with SiLU, [B, T, D] here, beside torch's conv1d and silu with the tokens innermost, each in its own layout."""

    passes: str  # fwd, fwd+bwd
    B: int
    T: int
    D: int
    W: int
    dtype: str = "float32"
    threads: int = 1
    memory = call = False

    @property
    def name(self):
        return f"conv/{self.passes}/{self.dtype}/B{self.B}.T{self.T}.D{self.D}.W{self.W}/t{self.threads}"

    @property
    def flops(self):
        return (6 if self.passes == "fwd+bwd" else 2) * self.W * self.B * self.T * self.D

    def inputs(self):
        torch.manual_seed(0)
        x, dy = (torch.randn(self.B, self.T, self.D).to(getattr(torch, self.dtype)) for _ in range(2))
        return x, torch.randn(self.D, self.W).to(x.dtype) * self.W ** -0.5, dy

    def operation(self, convolution, lay):
        x, weight, dy = self.inputs()
        x, dy = lay(x).contiguous(), lay(dy).contiguous()

        def forward():
            with torch.no_grad():
                return (lay(convolution(x, weight)),)

        def both():
            y = convolution(x, weight)
            dx, dweight = torch.autograd.grad(y, (x, weight), dy)
            return lay(y.detach()), lay(dx), dweight

        if self.passes == "fwd":
            return forward
        x.requires_grad_(), weight.requires_grad_()
        return both

    def ours(self):
        return self.operation(lambda x, weight: gdn.causal_conv1d(x, weight, activation="silu")[0], lambda x: x)

    def peers(self):
        def convolution(x, weight):
            return F.silu(F.conv1d(x, weight.unsqueeze(1), padding=self.W - 1, groups=self.D)[..., :self.T])

        return {"torch": self.operation(convolution, lambda x: x.transpose(1, 2))}

    def alone(self):
        x, weight, dy = self.inputs()
        numbers = (True, 1, 0)
        keep, forward = prepared("conv_fwd", {"x": x, "weight": weight}, numbers, (False,))
        if self.passes == "fwd":
            return lambda: (forward(), keep)
        held, backward = prepared("conv_bwd", {"x": x, "weight": weight, "dout": dy}, numbers, ())
        return lambda: (forward(), backward(), keep, held)


class Overhead:
    """The library's own work on the host for a whole operator on an NPU: a Go benchmark with a CANN that does nothing."""

    name = "ascend/kda/fwd/overhead"
    threads = 1

    def measure(self):
        command = ["go", "test", "-run", "XXX", "-bench", "BenchmarkOverhead", "-count", "5", "./ascendc"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        found = [float(ns) for ns in re.findall(r"^BenchmarkOverhead\S*\s+\d+\s+([\d.]+) ns/op", done.stdout, re.M)]
        if done.returncode or not found:
            raise SystemExit(f"{self.name}: {done.stdout}{done.stderr}")
        return {"name": self.name, "call_us": statistics.median(found) / 1e3, "peers": {}}


def prepared(name, given, numbers, wants):
    """All tensors of an operator's call, and a function that runs it on them."""
    table = _lib.OPS[name].row
    with torch.no_grad():
        results = library.operator(name)(*(given.get(t["name"]) for t in library.inputs(table)), *numbers, *wants)
    made = dict(zip((t["name"] for t in library.outputs(table)), results))
    given = {**given, **{n: t for n, t in made.items() if t.numel()}}
    views = [library.view(given[t["name"]]) if t["name"] in given else None for t in table["tensors"]]
    return given, lambda: _lib.OPS[name](views, numbers)


MODEL = (1, 2048, 32, 32, 128, 128)
ROWS = [
    *(Row(p, *MODEL, dtype=d, threads=t) for d in ("float32", "bfloat16") for t in (1, 2) for p in ("fwd", "fwd+bwd")),
    *(Row(p, *MODEL, l2norm=True, peer=False) for p in ("fwd", "fwd+bwd")),
    Row("fwd+bwd", 1, 4096, 32, 32, 128, 128, dtype="bfloat16", threads=2, memory=True),
    # Qwen3-Next and Qwen3.5; OLMo-Hybrid; small heads
    *(Row(p, 1, 2048, 16, 32, 128, 128) for p in ("fwd", "fwd+bwd")),
    *(Row(p, 1, 2048, 30, 30, 96, 192) for p in ("fwd", "fwd+bwd")),
    *(Row(p, 1, 2048, 32, 32, 64, 64) for p in ("fwd", "fwd+bwd")),
    # short prompts, and many sequences
    *(Row("fwd", 1, T, 32, 32, 128, 128) for T in (16, 64, 256)),
    Row("fwd+bwd", 16, 128, 32, 32, 128, 128),
    *(Row("decode", B, 1, 32, 32, 128, 128, threads=t) for B in (1, 64) for t in (1, 2)),
    Row("decode", 1, 1, 32, 32, 128, 128, dtype="bfloat16"),
    Row("decode", 1, 1, 1, 1, 128, 128, call=True),
    # Kimi-Linear; transformers' code takes minutes and tens of gigabytes at such lengths
    *(Row(p, *MODEL, dtype=d, threads=t, family="kda", peer=False) for d in ("float32", "bfloat16") for t in (1, 2) for p in ("fwd", "fwd+bwd")),
    Row("fwd", 1, 128, 32, 32, 128, 128, family="kda"),
    Row("fwd+bwd", 1, 4096, 16, 16, 128, 128, dtype="bfloat16", threads=2, memory=True, family="kda", peer=False),
    *(Row("decode", B, 1, 32, 32, 128, 128, family="kda") for B in (1, 64)),
    # SANA: a rank's share of a long video; a chunk while streaming
    *(FrameRow(p, 1, 61, 20, 112, threads=t) for t in (1, 2) for p in ("fwd", "fwd+bwd")),
    FrameRow("fwd", 1, 61, 20, 112, dtype="bfloat16"),
    FrameRow("fwd", 1, 11, 20, 128),
    # the channels of a layer's q, k and v
    *(ConvRow(p, 1, 4096, 4096, 4, threads=t) for t in (1, 2) for p in ("fwd", "fwd+bwd")),
    *(ConvRow(p, 1, 4096, 4096, 4, dtype="bfloat16") for p in ("fwd", "fwd+bwd")),
    Overhead(),
]


class Machine:
    """Peak and copy bandwidth of one thread."""

    def __init__(self):
        os.makedirs(OUT, exist_ok=True)
        path = os.path.join(OUT, "peak.so")
        cc = os.environ.get("CC", "gcc").split()
        native = "-mcpu=native" if platform.machine() == "aarch64" else "-march=native"
        subprocess.run([*cc, "-O3", native, "-ffp-contract=fast", "-shared", "-fPIC", "-o", path, os.path.join(ROOT, "build", "peak.c")], check=True)
        lib = ctypes.CDLL(path)
        self._peak, self._copy = lib.peak_gflops, lib.copy_seconds
        self._peak.argtypes, self._peak.restype = [ctypes.c_double], ctypes.c_double
        self._copy.argtypes, self._copy.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], ctypes.c_double
        self.buffers = torch.ones(2, 64 << 20, dtype=torch.uint8)
        self.peaks, self.copies = [], []

    def peak(self):
        self.peaks.append(self._peak(0.02))
        return self.peaks[-1]

    def copy(self):
        """GB/s, read and written bytes both counted."""
        to, source = self.buffers
        self.copies.append(2e-9 * source.numel() / self._copy(to.data_ptr(), source.data_ptr(), source.numel()))


OURS = {"gdn": {"chunk": gdn.chunk_gated_delta_rule, "recurrent": gdn.fused_recurrent_gated_delta_rule},
        "kda": {"chunk": gdn.chunk_kda, "recurrent": gdn.fused_recurrent_kda}}


def transformers_peer(family="gdn"):
    """{"chunk": ..., "recurrent": ...}, transformers' functions in plain PyTorch, or None where it has none."""
    try:
        if family == "gdn":
            from transformers.models.qwen3_next import modeling_qwen3_next as module
        else:
            from transformers.models.kimi_linear import modeling_kimi_linear as module
    except ImportError:
        return None
    names = {"chunk": ("torch_chunk_gated_delta_rule", "torch_chunk_kda", "chunk_kimi_delta_attention"),
             "recurrent": ("torch_recurrent_gated_delta_rule", "torch_recurrent_kda", "recurrent_kimi_delta_attention")}
    found = {form: next((getattr(module, name) for name in names[form] if hasattr(module, name)), None) for form in names}
    if None in found.values():
        return None
    # Unwrapped: the decorators of newer versions replace the function by another implementation where they find one.
    return {form: inspect.unwrap(function) for form, function in found.items()}


def inputs(row):
    torch.manual_seed(0)
    dtype = getattr(torch, row.dtype)
    q, k = (F.normalize(torch.randn(row.B, row.T, row.H, row.K), dim=-1).to(dtype) for _ in range(2))
    v = torch.randn(row.B, row.T, row.HV, row.V).to(dtype)
    gates = (row.B, row.T, row.HV, row.K)[:4 if row.family == "kda" else 3]
    g = F.logsigmoid(torch.randn(gates) + 2)  # float32 in models of any dtype
    beta = torch.rand(row.B, row.T, row.HV).to(dtype)
    return q, k, v, g, beta


def operation(row, chunk, recurrent):
    """A function without arguments that does what the row times and returns its results; chunk and recurrent are what to time."""
    tensors = inputs(row)
    if row.passes == "decode":
        state = torch.randn(row.B, row.HV, row.K, row.V)
        q, k, v, g, beta = tensors

        def decode():
            with torch.no_grad():
                return recurrent(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True)

        return decode
    flags = {"use_qk_l2norm_in_kernel": True} if row.l2norm else {}
    if row.passes == "fwd":

        def forward():
            with torch.no_grad():
                return chunk(*tensors[:3], g=tensors[3], beta=tensors[4], **flags)[:1]

        return forward
    for t in tensors:
        t.requires_grad_()
    upstream = torch.randn_like(tensors[2])

    def both():
        o, _ = chunk(*tensors[:3], g=tensors[3], beta=tensors[4], **flags)
        return (o.detach(), *torch.autograd.grad(o, tensors, upstream))

    return both


def alone(row):
    """A function that runs the library's operators of the row on tensors that exist already."""
    tensors = dict(zip(("q", "k", "v", "g", "beta"), inputs(row)))
    numbers = (0.0, row.l2norm, *([False] if row.family == "gdn" else [False, 0.0]), False, False, False)
    prefix = "" if row.family == "gdn" else row.family + "_"

    def wants(name):
        return [want == ("output_final_state" if row.passes == "decode" else "save") and row.passes != "fwd" for want in library.wants(_lib.OPS[name].row)]

    if row.passes == "decode":
        state = torch.randn(row.B, row.HV, row.K, row.V)
        keep, run = prepared(prefix + "recurrent_fwd", {**tensors, "initial_state": state}, numbers, wants(prefix + "recurrent_fwd"))
        return lambda: (run(), keep)
    keep, forward = prepared(prefix + "fwd", tensors, numbers, wants(prefix + "fwd"))
    if row.passes == "fwd":
        return lambda: (forward(), keep)
    held, backward = prepared(prefix + "bwd", {**tensors, "tape": keep["tape"], "dout": torch.randn_like(tensors["v"])}, numbers, ())
    return lambda: (forward(), backward(), keep, held)


def timed(f, clock):
    begin = clock()
    f()
    return clock() - begin


def distance(ours, theirs):
    """The largest relative difference of two lists of tensors."""
    return max(((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item() for a, b in zip(ours, theirs))


def measure(row, machine, cores):
    torch.set_num_threads(row.threads)
    gdn.set_num_threads(row.threads)
    os.sched_setaffinity(0, cores[:1] if row.threads == 1 else cores)
    ours, theirs = row.ours(), row.peers()
    results = ours()  # the first call of each is not timed, but compared
    for name, peer in theirs.items():
        apart = distance(results, peer())
        if apart > (2e-2 if row.dtype == "bfloat16" else 1e-4):
            raise SystemExit(f"{row.name}: libgdn and {name} differ by {apart:.1e}; figures of wrong results are worth nothing")
    del results
    operators = row.alone()
    gc.collect()
    gc.disable()

    # As many calls a round as fill a tenth of a second, rounds for about three seconds, a slow peer in the first three rounds only.
    clock = time.process_time if row.threads == 1 else time.perf_counter
    once = statistics.median(timed(operators, clock) for _ in range(3))
    calls = max(1, min(1000, int(0.1 / once)))
    rounds = max(5, min(15, int(3 / (once * calls))))
    mine, called, others, peaks, wall, cpu = [], [], {name: [] for name in theirs}, [], 0.0, 0.0
    for turn in range(rounds):
        peaks.append(machine.peak())
        began = time.perf_counter(), time.process_time()
        mine += [timed(operators, clock) for _ in range(calls)]
        wall, cpu = wall + time.perf_counter() - began[0], cpu + time.process_time() - began[1]
        called += [timed(ours, clock) for _ in range(calls)]
        if turn % 4 == 0:
            machine.copy()
        for name, times in others.items():
            if turn < 3 or times[0] < 0.1:
                times += [timed(theirs[name], clock) for _ in range(max(1, min(calls, int(0.1 / times[0]))) if times else 1)]
    gc.enable()

    seconds, peak = statistics.median(mine), statistics.median(peaks)
    gflops = row.flops / seconds * 1e-9
    result = {"name": row.name, "ms": seconds * 1e3, "gflops": gflops, "peak_gflops": peak, "fraction": gflops / (peak * row.threads),
              "best_ms": min(mine) * 1e3, "torch_ms": statistics.median(called) * 1e3, "calls": len(mine), "cores": cpu / wall, "peers": {}}
    for name, times in others.items():
        result["peers"][name] = {"ms": statistics.median(times) * 1e3, "ratio": statistics.median(times) / statistics.median(called),
                                 "calls": len(times)}
    if row.threads > 1 and cpu / wall < 0.8 * row.threads:
        result["disturbed"] = True
        for figures in result["peers"].values():
            del figures["ratio"]  # threads that wait for each other's core say nothing about either implementation
    if row.passes == "decode":
        result["state_gb_s"] = 8e-9 * row.B * row.HV * row.K * row.V / seconds
    if row.call:
        result["call_us"] = statistics.median(timed(ours, time.perf_counter) for _ in range(20000)) * 1e6
    if row.memory:
        result["extra_gib"] = memory_in_child(row, "libgdn")
        if "transformers" in theirs:
            result["peers"]["transformers"]["extra_gib"] = memory_in_child(row, "transformers")
    return result


def memory_in_child(row, who):
    """Peak extra memory, measured in a process that has computed nothing of that size before."""
    words = [sys.executable, os.path.abspath(__file__), "--memory", json.dumps(dataclasses.asdict(row)), "--of", who]
    return float(subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout)


def memory(row, who):
    """GiB that a call needs at its peak beyond inputs, outputs and the gradients of both."""
    def status(field):
        with open("/proc/self/status") as f:
            return next(int(line.split()[1]) * 1024 for line in f if line.startswith(field))

    torch.set_num_threads(row.threads)
    gdn.set_num_threads(row.threads)
    peer = OURS[row.family] if who == "libgdn" else transformers_peer(row.family)
    # A tiny call loads the libraries; all memory for the sizes of the row is still to come.
    operation(dataclasses.replace(row, T=16, H=1, HV=1), **peer)()
    call = operation(row, **peer)
    gc.collect()
    before = status("VmRSS")
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")  # VmHWM starts anew
    results = call()
    return (status("VmHWM") - before - sum(t.nbytes for t in results)) / GIB


def commit():
    def git(*words):
        return subprocess.run(["git", "-C", ROOT, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout.strip()

    name = git("rev-parse", "--short=12", "HEAD") or "unknown"
    return name + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")


def cpu_name():
    with open("/proc/cpuinfo") as f:
        names = [line.split(":", 1)[1].strip() for line in f if line.startswith("model name")]
    return names[0] if names else platform.machine()


def table(report):
    """bench.md"""
    lines = [
        "# Benchmark",
        "",
        f"Commit {report['commit']} · {report['cpu']}, {report['cores']} cores · {report['library']} · PyTorch {report['torch']}"
        + (f" · transformers {report['transformers']}" if report["transformers"] else ""),
        "",
        f"One thread: FMA peak {report['peak_gflops']:.0f} GFLOP/s, copy {report['copy_gb_s']:.1f} GB/s (read and written bytes both counted).",
        "",
        "Medians: CPU time of the process for one thread (t1), wall time for more. ms: the operators on memory that is there. From PyTorch: the",
        "same with allocation of the results.",
        "GFLOP/s count 6 K V per token and value head forward, 22 K V with backward; frame GDN 2 D^3 per frame and head, 6 D^3. Fraction: of the FMA",
        "peak of one thread times the threads, measured in turn with the row. Peers: others' algorithms in plain PyTorch on the same tensors and",
        "threads (transformers' functions; for frame GDN the scan by cumulative products, and a loop of baddbmm), and how many times longer they take",
        "than libgdn from PyTorch. Call: wall time.",
        "",
        "| row | ms | GFLOP/s | fraction | from PyTorch, ms | peer, ms | ratio | more |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in report["rows"]:
        more = []
        if "call_us" in row:
            more.append(f"{row['call_us']:.1f} µs a call")
        if "state_gb_s" in row:
            more.append(f"{row['state_gb_s']:.1f} GB/s of state")
        if "extra_gib" in row:
            more.append(f"{row['extra_gib']:.2f} GiB extra")
        more += [f"{name} {peer['extra_gib']:.2f} GiB" for name, peer in row["peers"].items() if "extra_gib" in peer]
        if "disturbed" in row:
            more.append(f"disturbed: got {row['cores']:.1f} cores")
        if "ms" not in row:
            lines.append(f"| {row['name']} | | | | | | | {', '.join(more)} |")
            continue
        digits = 1 if row["ms"] >= 10 else 3
        lines.append(f"| {row['name']} | {row['ms']:.{digits}f} | {row['gflops']:.1f} | {row['fraction']:.2f} | {row['torch_ms']:.{digits}f} | "
                     + "<br>".join(f"{name} {peer['ms']:.{1 if peer['ms'] >= 10 else 3}f}" for name, peer in row["peers"].items()) + " | "
                     + "<br>".join(f"{peer['ratio']:.1f}" for peer in row["peers"].values() if "ratio" in peer) + f" | {', '.join(more)} |")
    return "\n".join(lines) + "\n"


def update_readme(report):
    """Replaces what lies between the marks by the rows that have a peer."""
    peers = {row["name"]: [(name, peer) for name, peer in row["peers"].items() if "ratio" in peer] for row in report["rows"]}
    lines = [
        f"{report['cpu']}, {report['cores']} cores, FMA peak {report['peak_gflops']:.0f} GFLOP/s a core; PyTorch {report['torch']}, transformers",
        f"{report['transformers']}; commit {report['commit']}. t1 is one thread. Fraction: of the FMA peak, by the operators alone, with 6 K V FLOPs counted per",
        "token and value head forward and 22 K V with backward (frame GDN: 2 D^3 per frame and head, 6 D^3). Times are of calls from PyTorch. Peers are",
        "in plain PyTorch: transformers' own code; for frame GDN the scan by cumulative products (seed) and a loop of torch.baddbmm.",
        "",
        "| operator, pass, dtype, sizes, threads | fraction | libgdn, ms | peer, ms | ratio |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in report["rows"]:
        def shown(ms):
            return f"{ms:.3g}" if ms < 1000 else f"{ms:,.0f}"

        if theirs := peers[row["name"]]:
            fraction = "" if "/decode/" in row["name"] else f"{row['fraction']:.2f}"  # it is bound by memory
            lines.append(f"| {row['name']} | {fraction} | {shown(row['torch_ms'])} | " + "<br>".join(f"{name} {shown(peer['ms'])}" for name, peer in theirs)
                         + " | " + "<br>".join(f"{peer['ratio']:.1f}" for _, peer in theirs) + " |")
    lines += [""]
    if any(row.get("cores", 1) < 0.9 or "disturbed" in row for row in report["rows"]):
        lines.append("Other jobs ran on the machine at the time, and what they did to caches and memory is in these figures.")
    for row in report["rows"]:
        if "extra_gib" in row:
            other = row["peers"].get("transformers", {}).get("extra_gib")
            lines.append(f"Memory of {row['name']} beyond inputs, outputs and their gradients: {row['extra_gib']:.2f} GiB"
                         + (f"; transformers {other:.2f} GiB." if other else "."))
        if "call_us" in row:
            what = "A call from PyTorch on one token" if "ms" in row else "The library's own time on the host for a forward on an Ascend NPU"
            lines.append(f"{what} ({row['name']}): {row['call_us']:.0f} µs.")
    path = os.path.join(ROOT, "README.md")
    with open(path, encoding="utf-8") as f:
        text = f.read()
    begin, end = "<!-- measured: begin -->\n", "<!-- measured: end -->"
    before, rest = text.split(begin)
    with open(path, "w", encoding="utf-8") as f:
        f.write(before + begin + "\n".join(lines) + "\n" + end + rest.split(end)[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="PATTERN", default="", help="rows whose name contains it")
    parser.add_argument("--readme", action="store_true", help="also write the results into README.md")
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    parser.add_argument("--of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory:
        print(memory(Row(**json.loads(args.memory)), args.of))
        return
    rows = [row for row in ROWS if fnmatch.fnmatchcase(row.name, f"*{args.only}*")]
    if args.list:
        print("\n".join(row.name for row in rows))
        return
    if not rows:
        parser.error(f"no row has {args.only!r} in its name; --list prints them")

    cores = sorted(os.sched_getaffinity(0))
    machine = Machine()
    if transformers_peer():
        import transformers
    report = {"commit": commit(), "cpu": cpu_name(), "cores": len(cores), "library": _lib.library().gdn_build_info().decode(),
              "torch": torch.__version__, "transformers": transformers.__version__ if transformers_peer() else None}
    report["rows"] = []
    for row in rows:
        if row.threads > len(cores):
            print(f"{row.name}: left out, {len(cores)} core(s) may be used")
            continue
        if isinstance(row, Overhead):
            result = row.measure()
            report["rows"].append(result)
            print(f"{row.name}: {result['call_us']:.1f} us a call", flush=True)
            continue
        result = measure(row, machine, cores)
        report["rows"].append(result)
        ratio = "".join(f", {figures['ratio']:.1f}x {name}" for name, figures in result["peers"].items() if "ratio" in figures)
        ratio += ", disturbed" if "disturbed" in result else ""
        print(f"{row.name}: {result['ms']:.3f} ms, {result['fraction']:.2f} of peak; from PyTorch {result['torch_ms']:.3f} ms{ratio}", flush=True)
    if not report["rows"]:
        return
    if not machine.peaks:
        machine.peak(), machine.copy()
    report["peak_gflops"] = statistics.median(machine.peaks)
    report["copy_gb_s"] = statistics.median(machine.copies)
    with open(os.path.join(OUT, "bench.json"), "w") as f:
        json.dump(report, f, indent=1)
    with open(os.path.join(OUT, "bench.md"), "w") as f:
        f.write(table(report))
    if args.readme:
        update_readme(report)
    print(f"written: {os.path.relpath(OUT)}/bench.json and bench.md")


if __name__ == "__main__":
    main()
