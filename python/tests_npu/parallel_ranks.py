"""One rank of test_parallel.py: GDN (and KDA forward) over ranks with NPU tensors, hccl between them and vendors' operators below, against one
process on the CPU. Arguments: the process group's backend, then protocols."""

import os
import sys

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401  registers hccl

import fake
import gdn
from gdn import parallel

rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
bf16 = torch.bfloat16


def near(got, want, name):
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    assert got.shape == want.shape and not got.isnan().any(), name
    error = (got - want).norm() / want.norm().clamp(min=1e-20)
    assert error <= 2e-2, f"rank {rank}: {name}: {error.item()}"


def case(function, offsets, lengths, protocol, backward):
    draw = torch.Generator().manual_seed(3)
    randn = lambda *shape: torch.randn(*shape, generator=draw)  # noqa: E731
    T, H, HV, D, kda = offsets[-1], 4, 4, 128, function is gdn.chunk_kda
    k = randn(1, T, H, D)
    whole = {"q": randn(1, T, H, D).to(bf16), "k": (k / k.norm(dim=-1, keepdim=True)).to(bf16), "v": randn(1, T, HV, D).to(bf16),
             "g": -0.3 * torch.rand(1, T, HV, *((D,) if kda else ()), generator=draw), "beta": torch.rand(1, T, HV, generator=draw)}
    do, begin = randn(1, T, HV, D).to(bf16), sum(lengths[:rank])
    own = slice(begin, begin + lengths[rank])
    x = {name: t.clone().requires_grad_(backward) for name, t in whole.items()}
    o, _ = function(**x, cu_seqlens=torch.tensor(offsets))
    if backward:
        o.backward(do)
    here = {name: t[:, own].contiguous().npu().requires_grad_(backward) for name, t in whole.items()}
    cp = parallel.ContextParallel(dist.group.WORLD, protocol)
    plan = parallel.SequencePlan(offsets, lengths, rank)
    with torch.set_grad_enabled(backward):
        mine, _ = function(**here, cp=cp.bind(plan))
    near(mine, o[:, own], f"{function.__name__} {protocol} o")
    if backward:
        mine.backward(do[:, own].npu())
        for name, t in here.items():
            near(t.grad, x[name].grad[:, own], f"{function.__name__} {protocol} d{name}")


torch.npu.set_device(rank)
dist.init_process_group(sys.argv[1])
for protocol in sys.argv[2:]:
    for offsets, lengths in ([0, 160], [40] * 4), ([0, 30, 30, 95, 130], [50, 20, 40, 20]):
        case(gdn.chunk_gated_delta_rule, offsets, lengths, protocol, True)
        case(gdn.chunk_kda, offsets, lengths, protocol, False)
torch.npu.synchronize()
assert not fake.violations(), fake.violations()
dist.barrier()
print(f"rank {rank} agrees", flush=True)
dist.destroy_process_group()
