"""What a result may not depend on: the instruction set, the number of threads, who else computes, which signals arrive. Child processes
compute with NumPy, for that loads sooner than torch."""

import platform
import shutil
import signal
import subprocess
import threading

import numpy as np
import pytest
import torch

import gdn
import reference
from harness import child, run, same, upstream

NUMPY = """
import os, signal, sys, time
sys.modules["torch"] = None
import numpy as np
import gdn.array
from gdn import _lib

def work(T=70, H=2, D=32, **options):
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, T, H, D), dtype=np.float32) / 8 for _ in range(3))
    return gdn.array.chunk_gated_delta_rule(q, k, v, -rng.random((1, T, H)), rng.random((1, T, H)), **options)[0]
"""


# Instruction sets

COMPUTE = NUMPY + """
rng = np.random.default_rng(3)
results = {}
for dtype in (np.float32, np.float16, np.float64):
    for K, V in ((40, 72), (64, 64)):
        T, H, HV = 150, 2, 4
        x = dict(q=rng.random((1, T, H, K)), k=rng.random((1, T, H, K)), v=rng.standard_normal((1, T, HV, V)),
                 g=rng.standard_normal((1, T, HV)), beta=rng.standard_normal((1, T, HV)), A_log=rng.standard_normal(HV),
                 dt_bias=rng.standard_normal(HV), initial_state=rng.standard_normal((1, HV, K, V)))
        x = {name: y.astype(dtype) for name, y in x.items()}
        ups = dict(dout=rng.standard_normal((1, T, HV, V)).astype(dtype),
                   dht=rng.standard_normal((1, HV, K, V)).astype(np.promote_types(dtype, np.float32)))
        numbers = dict(qk_l2norm=True, gate=True, beta_sigmoid=True)
        for form in ("", "recurrent_"):
            made = getattr(gdn.array, form + "fwd")(**x, **numbers, output_final_state=True, save=True)
            back = getattr(gdn.array, form + "bwd")(**x, **numbers, **ups, tape=made.pop("tape"))
            for name, y in {**made, **back}.items():
                results[f"{form}{np.dtype(dtype)}.{K}.{name}"] = y
np.savez(sys.argv[1], **results)
print(_lib.library().gdn_isa().decode())
"""

ISAS = {"x86_64": ["x86-64-v2", "avx2", "avx512"], "aarch64": ["neon"]}.get(platform.machine(), [])


def test_every_instruction_set(tmp_path):
    """GDN_ISA forces each one that the processor has, and all compute the same but for rounding; other names change nothing."""
    best = child(COMPUTE, str(tmp_path / "best.npz"), GDN_ISA=None).stdout.strip()
    first = np.load(tmp_path / "best.npz")
    available = ISAS[:ISAS.index(best) + 1]
    for isa in available:
        assert child(COMPUTE, str(tmp_path / f"{isa}.npz"), GDN_ISA=isa).stdout.strip() == isa
        forced = np.load(tmp_path / f"{isa}.npz")
        assert set(forced) == set(first)
        for name, got in forced.items():
            assert isa != best or np.array_equal(first[name], got)
            reference.check(name.split(".")[-1], torch.from_numpy(first[name]), torch.from_numpy(got))
    for name in ISAS[len(available):] + ["z80"]:
        assert child(COMPUTE, str(tmp_path / "other.npz"), GDN_ISA=name).stdout.strip() == best


# Threads

EVERYTHING = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, output_final_state=True)
both = pytest.mark.parametrize("function", [gdn.chunk_gated_delta_rule, gdn.fused_recurrent_gated_delta_rule], ids=["chunk", "recurrent"])


def make(B, T, H, HV, K, V, dtype, cu=None):
    tensors = dict(q=torch.randn(B, T, H, K).to(dtype), k=torch.randn(B, T, H, K).to(dtype), v=torch.randn(B, T, HV, V).to(dtype),
                   g=torch.randn(B, T, HV), beta=torch.randn(B, T, HV), A_log=torch.randn(HV), dt_bias=torch.randn(HV),
                   initial_state=torch.randn(B if cu is None else len(cu) - 1, HV, K, V))
    return tensors if cu is None else dict(tensors, cu_seqlens=torch.tensor(cu))


@pytest.fixture
def threads():
    n = gdn.get_num_threads()
    yield gdn.set_num_threads
    gdn.set_num_threads(n)


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("B,T,H,HV,K,V,cu", [
    (2, 200, 1, 3, 32, 40, None), (1, 300, 1, 1, 128, 256, None), (1, 1, 2, 8, 128, 128, None), (1, 333, 2, 2, 64, 64, [0, 1, 70, 70, 300])])
def test_bits_do_not_depend_on_threads(B, T, H, HV, K, V, cu, dtype, function, threads):
    tensors = make(B, T, H, HV, K, V, dtype, cu)
    do, dht = upstream(tensors, len(cu) - 1 if cu else None)
    threads(1)
    one = run(function, tensors, EVERYTHING, do, dht)
    for n in (2, 3, 7):
        threads(n)
        same(run(function, tensors, EVERYTHING, do, dht), one)


@both
def test_calls_of_different_sizes_from_many_threads(function, threads):
    """Gradients among them, and scratch that grows while others compute in theirs."""
    threads(2)
    cases = []
    for T in (1, 40, 70, 130, 200, 256):
        tensors = make(1, T, 1, 2, 32, 48, torch.float32)
        do, dht = upstream(tensors)
        cases.append((tensors, do, dht, run(function, tensors, EVERYTHING, do, dht)))
    failures, barrier = [], threading.Barrier(8)

    def calls(i):
        try:
            barrier.wait()
            for j in range(20):
                tensors, do, dht, expected = cases[(i + j) % len(cases)]
                same(run(function, tensors, EVERYTHING, do, dht), expected)
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=calls, args=(i,)) for i in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures, failures[0]


@pytest.mark.slow
def test_spawned_process():
    """What the error in a forked child advises."""
    child(NUMPY + """
import multiprocessing
work()
x = np.full((1, 10, 1, 8), 0.25, np.float32)
with multiprocessing.get_context("spawn").Pool(1) as pool:
    o, _ = pool.apply_async(gdn.array.chunk_gated_delta_rule, (x, x, x)).get(60)
assert np.array_equal(o, gdn.array.chunk_gated_delta_rule(x, x, x)[0])
""", timeout=90)


# Signals

ALARM = """
#include <signal.h>
#include <string.h>
#include <sys/time.h>
volatile int fired[2];
static void handle(int number) {
    volatile char deep[4096]; // as handlers need that format something
    memset((char *)deep, number, sizeof deep);
    fired[number == SIGALRM]++;
}
int start(void) {
    struct sigaction action = {.sa_handler = handle};
    struct itimerval every = {{0, 1000}, {0, 1000}};
    return sigaction(SIGUSR1, &action, 0) || sigaction(SIGALRM, &action, 0) || setitimer(ITIMER_REAL, &every, 0);
}
"""


def test_handler_on_the_interrupted_stack(tmp_path):
    """Handlers of other C code that do not ask for the alternate stack and need some, hit by a thousand signals a second."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    (tmp_path / "alarm.c").write_text(ALARM)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", tmp_path / "alarm.so", tmp_path / "alarm.c"], check=True)
    child(NUMPY + """
import ctypes
first = work(500)
alarm = ctypes.CDLL(sys.argv[1])
assert alarm.start() == 0
stop = time.monotonic() + 1
while time.monotonic() < stop:
    os.kill(os.getpid(), signal.SIGUSR1)
    assert np.array_equal(work(500), first)
    try:
        work(scale=float("inf"))  # the way through Go that makes a text
    except ValueError:
        pass
fired = (ctypes.c_int * 2).in_dll(alarm, "fired")
assert min(fired) > 10, list(fired)
""", str(tmp_path / "alarm.so"))


def test_crash_without_a_handler():
    """A SIGSEGV in other C code ends the process as it would without the library, not with Go's exit status and traces."""
    done = child(NUMPY + "import ctypes\nwork()\nctypes.CDLL(None).strlen(ctypes.c_void_p(8))", status=-signal.SIGSEGV)
    assert "goroutine" not in done.stderr
