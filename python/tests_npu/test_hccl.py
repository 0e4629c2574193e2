"""torch_npu's ProcessGroupHCCL between local processes, on the fake libhccl."""

import os
import subprocess
import sys
import time

import pytest

import fake

HERE = os.path.dirname(os.path.abspath(fake.__file__))


def launch(n, *args, cann="cann", **environment):
    lib = str(fake.CANN.parent / cann / "lib64")
    environment = {**os.environ, "HCCL_EXEC_TIMEOUT": "60", **environment, "LD_LIBRARY_PATH": lib, "GDN_FAKE_CANN": str(fake.CANN.parent / cann)}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(n), os.path.join(HERE, "ranks.py"), *args]
    return subprocess.run(command, env=environment, cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)


@pytest.mark.parametrize("cann, backend, version", [("cann", "cpu:gloo,npu:hccl", "9.0"), ("cann-old", "hccl", "8.3")])
def test_four_ranks(cann, backend, version):
    """CANN 9.0 takes batched messages as a group of calls, 8.3 as one."""
    done = launch(4, backend, cann=cann)
    assert done.returncode == 0 and f"all ranks agree {version}" in done.stdout, done.stdout[-4000:]
    assert "violation" not in done.stdout


@pytest.mark.parametrize("name, says", [
    ("other collective", "called AllGather"),
    ("other size", "16 bytes"),
    ("other dtype", "dtype 2"),
    ("absent", "waited too long in AllReduce"),
    ("dead", "rank 1 left during AllReduce"),
    ("both send first", "waited too long in Send"),
    ("one device", "are both on device 0"),
])
def test_mistakes_end_with_a_message(name, says):
    began = time.time()
    done = launch(2, "mistake", name, HCCL_EXEC_TIMEOUT="5", HCCL_CONNECT_TIMEOUT="20")
    assert done.returncode != 0 and says in done.stdout, done.stdout[-4000:]
    assert time.time() - began < 120
