"""One rank of test_hccl.py: argument 1 is a backend, or the name of a mistake. Every rank knows every rank's data, so each result is compared
with plain arithmetic on the CPU."""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401  registers hccl

import fake

rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
right, left = (rank + 1) % ranks, (rank - 1) % ranks


def data(r, dtype, *shape):
    """Rank r's: small whole numbers, so that sums are exact in bfloat16 too."""
    return torch.randint(-8, 8, shape or (6, 5), generator=torch.Generator().manual_seed(r)).to(dtype)


def on_device(x):
    return x.to(f"npu:{rank}")


def empty(dtype, *shape):
    return torch.empty(*shape, dtype=dtype, device=f"npu:{rank}")


def same(got, want):
    assert got.device.index == rank and got.dtype == want.dtype and got.cpu().equal(want), (rank, got.cpu(), want)


def collectives(dtype):
    mine, all_ = on_device(data(rank, dtype)), [data(r, dtype) for r in range(ranks)]
    x = empty(dtype, ranks * 6, 5)
    dist.all_gather_into_tensor(x, mine)
    same(x, torch.cat(all_))
    parts = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(parts, mine)
    for part, want in zip(parts, all_):
        same(part, want)
    for op, want in (dist.ReduceOp.SUM, sum(all_)), (dist.ReduceOp.MAX, torch.stack(all_).amax(0)), (dist.ReduceOp.MIN, torch.stack(all_).amin(0)):
        x = mine.clone()
        dist.all_reduce(x, op)
        same(x, want)
    x = mine.clone()
    work = dist.broadcast(x, 1, async_op=True)
    work.wait()
    same(x, all_[1])
    x = mine.clone()
    dist.reduce(x, 0)
    if rank == 0:
        same(x, sum(all_))
    big = [data(r, dtype, 2 * ranks, 3) for r in range(ranks)]
    rows = slice(2 * rank, 2 * rank + 2)
    x = empty(dtype, 2, 3)
    dist.reduce_scatter_tensor(x, on_device(big[rank]))
    same(x, sum(b[rows] for b in big))
    x = empty(dtype, 2, 3)
    dist.reduce_scatter(x, list(on_device(big[rank]).chunk(ranks)))
    same(x, sum(b[rows] for b in big))
    x = empty(dtype, 2, 3)
    dist.scatter(x, list(on_device(big[0]).chunk(ranks)) if rank == 0 else None, 0)
    same(x, big[0][rows])
    x = empty(dtype, 2 * ranks, 3)
    dist.all_to_all_single(x, on_device(big[rank]))
    same(x, torch.cat([b[rows] for b in big]))
    counts = [r + 1 for r in range(ranks)]  # every rank sends r + 1 rows to rank r
    uneven = [data(r, dtype, sum(counts), 3) for r in range(ranks)]
    x = empty(dtype, ranks * (rank + 1), 3)
    dist.all_to_all_single(x, on_device(uneven[rank]), [rank + 1] * ranks, counts)
    same(x, torch.cat([u.split(counts)[rank] for u in uneven]))
    parts = [empty(dtype, rank + 1, 3) for _ in range(ranks)]
    dist.all_to_all(parts, list(on_device(uneven[rank]).split(counts)))
    for part, u in zip(parts, uneven):
        same(part, u.split(counts)[rank])
    parts = [empty(dtype, r + 1, 3) for r in range(ranks)]
    dist.all_gather(parts, on_device(data(rank, dtype, rank + 1, 3)))
    for r, part in enumerate(parts):
        same(part, data(r, dtype, r + 1, 3))
    a, b = on_device(data(rank, dtype)), on_device(data(rank + 7, dtype))
    with dist._coalescing_manager(device=torch.device("npu", rank), async_ops=True) as both:
        dist.all_reduce(a), dist.all_reduce(b)
    both.wait()
    same(a, sum(all_))
    same(b, sum(data(r + 7, dtype) for r in range(ranks)))


def ring(x, to, source, group=None):
    out = torch.empty_like(x)
    for w in dist.batch_isend_irecv([dist.P2POp(dist.isend, x.contiguous(), to, group), dist.P2POp(dist.irecv, out, source, group)]):
        w.wait()
    return out


def point_to_point(dtype):
    mine = on_device(data(rank, dtype))
    x = torch.empty_like(mine)
    if rank:  # a chain of blocking calls
        dist.recv(x, rank - 1)
        same(x, data(rank - 1, dtype))
    if rank + 1 < ranks:
        dist.send(mine, rank + 1)
    same(ring(mine, right, left), data(left, dtype))
    many = 1 << 20  # more than a socket takes at once
    same(ring(torch.full((many,), rank, dtype=dtype).to(f"npu:{rank}"), right, left), torch.full((many,), left, dtype=dtype))


def groups(dtype):
    halves = [list(range(ranks // 2)), list(range(ranks // 2, ranks))]
    made = [dist.new_group(h) for h in halves]
    mine = rank >= ranks // 2
    x = on_device(data(rank, dtype))
    dist.all_reduce(x, group=made[mine])
    same(x, sum(data(r, dtype) for r in halves[mine]))
    i = halves[mine].index(rank)
    x = ring(on_device(data(rank, dtype)), halves[mine][(i + 1) % len(halves[mine])], halves[mine][i - 1], made[mine])
    same(x, data(halves[mine][i - 1], dtype))
    dist.barrier(made[mine])
    dist.destroy_process_group(made[mine])


class Gather(torch.autograd.Function):
    """What context parallelism needs: gather the sequence, sum everybody's gradient of my piece."""

    @staticmethod
    def forward(ctx, x):
        out = x.new_empty(ranks * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(out, x)
        return out

    @staticmethod
    def backward(ctx, g):
        out = g.new_empty(g.shape[0] // ranks, *g.shape[1:])
        dist.reduce_scatter_tensor(out, g.contiguous())
        return out


def autograd(dtype):
    x = on_device(data(rank, dtype)).requires_grad_()
    gradients = [data(100 + r, dtype, 6 * ranks, 5) for r in range(ranks)]
    Gather.apply(x).backward(on_device(gradients[rank]))
    same(x.grad, sum(g[6 * rank:6 * rank + 6] for g in gradients))


def all_of_it(backend):
    torch.npu.set_device(rank)
    dist.init_process_group(backend)
    for dtype in torch.float32, torch.bfloat16:
        collectives(dtype), point_to_point(dtype), groups(dtype), autograd(dtype)
    x = torch.tensor([rank + 1, 2**40]).to(f"npu:{rank}")
    dist.all_reduce(x)
    assert x.tolist() == [ranks * (ranks + 1) // 2, ranks * 2**40]
    dist.barrier()
    if "gloo" in backend:  # the same group serves host tensors
        x = torch.full((3,), float(rank))
        dist.all_reduce(x)
        assert x.eq(ranks * (ranks - 1) / 2).all()
        objects = [None] * ranks
        dist.all_gather_object(objects, {"rank": rank})
        assert [o["rank"] for o in objects] == list(range(ranks))
    torch.npu.synchronize()
    version = (fake.C.c_char * 512)()
    fake.check(fake.acl.aclsysGetCANNVersion(0, version))
    grouped, batched = fake.acl.gdnfake_calls(b"HcclGroupStart"), fake.acl.gdnfake_calls(b"HcclBatchSendRecv")
    assert bool(batched) == version.value.startswith(b"8"), (version.value, grouped, batched)
    dist.destroy_process_group()
    assert not fake.violations(), fake.violations()
    if rank == 0:
        print("all ranks agree", version.value.decode(), flush=True)


def mistake(name):
    torch.npu.set_device(0 if name == "one device" else rank)
    dist.init_process_group("hccl")
    x = torch.ones(4).npu()
    dist.all_reduce(x)
    torch.npu.synchronize()
    if name == "other collective":
        dist.all_reduce(x) if rank else dist.all_gather_into_tensor(torch.empty(8).npu(), x)
    elif name == "other size":
        dist.all_reduce(torch.ones(4 + rank).npu())
    elif name == "other dtype":
        dist.all_reduce(torch.ones(4, dtype=torch.float32 if rank else torch.int32).npu())
    elif name == "absent":
        if rank:
            time.sleep(60)
        dist.all_reduce(x)
    elif name == "dead":
        if rank:
            os._exit(0)
        dist.all_reduce(x)
    elif name == "both send first":
        work = [dist.isend(x, 1 - rank), dist.irecv(torch.empty(4).npu(), 1 - rank)]
        [w.wait() for w in work]
    torch.npu.synchronize()
    print(f"rank {rank}: no error", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "mistake":
        try:
            mistake(sys.argv[2])
        except RuntimeError as e:
            print(f"rank {rank}: {e}", flush=True)
            os._exit(1)
    else:
        all_of_it(sys.argv[1])
