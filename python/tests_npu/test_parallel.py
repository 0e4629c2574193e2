"""Context parallelism on NPU tensors: four processes, torch_npu's hccl between them, vendors' operators below."""

import os
import subprocess
import sys

import pytest

import fake

HERE = os.path.dirname(os.path.abspath(fake.__file__))


@pytest.mark.parametrize("backend, protocols", [("cpu:gloo,npu:hccl", ["p2p", "all_gather"]), ("cpu:gloo,npu:hccl", ["recursive_doubling", "ulysses"])])
def test_four_ranks(backend, protocols):
    environment = {**os.environ, "HCCL_EXEC_TIMEOUT": "120"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", os.path.join(HERE, "parallel_ranks.py"), backend, *protocols]
    done = subprocess.run(command, env=environment, cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=500)
    assert done.returncode == 0 and all(f"rank {r} agrees" in done.stdout for r in range(4)), done.stdout[-4000:]
    assert "violation" not in done.stdout
