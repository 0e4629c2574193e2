"""The torchrun example trains as one process does."""

import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, os.pardir)


@pytest.mark.slow
def test_example():
    """It ends with an error where a loss differs by more than 1e-5."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("PyTorch without gloo")
    environment = {**os.environ, "PYTHONPATH": os.path.join(ROOT, "python"), "OMP_NUM_THREADS": "1", "GDN_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4",
                           os.path.join(ROOT, "examples", "lm_parallel.py")], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if "loss within" in line]
    assert [line.split()[0] for line in lines] == ["p2p", "all_gather", "grouped(width=2)", "recursive_doubling", "ulysses",
                                                   "hybrid(ulysses_degree=2,", "auto"]
