#!/usr/bin/env python3
"""Trains the language model of lm.py on sequences that are cut over ranks, by each protocol, and compares every step's loss with training in
one process.

usage: torchrun --standalone --nproc-per-node 4 examples/lm_parallel.py [--steps 20] [--length 512]

One line for each protocol: how far its losses are from those of one process, and what a rank sends in a step for the state and the short
convolution (the mean over the ranks, and the most). The gradients of the parameters are added up over the ranks as data parallelism does.
"""

import argparse
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import gdn
import gdn.parallel
import lm

PROTOCOLS = ["p2p", "all_gather", gdn.parallel.grouped(2), "recursive_doubling", "ulysses", gdn.parallel.hybrid(2), "auto"]


def make_model():
    torch.manual_seed(0)
    return lm.LanguageModel(dim=64, layers=2, heads=4, head_dim=32)


def train(model, batches, step):
    """The loss of each batch; `step` computes it and leaves gradients."""
    optimizer, losses = lm.make_optimizer(model), []
    for x, y in batches:
        optimizer.zero_grad()
        losses.append(step(x, y))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return losses


def alone(model):
    def step(x, y):
        loss = lm.loss_of(model, gdn.chunk_gated_delta_rule, x, y)
        loss.backward()
        return loss.item()

    return step


def together(model, cp):
    """The same on this rank's tokens."""
    rule = partial(gdn.chunk_gated_delta_rule, cp=cp)
    for block in model.blocks:
        block.mixer.before = partial(gdn.parallel.halo, cp=cp)

    def step(x, y):
        n = x.shape[1] // cp.size
        mine = slice(cp.rank * n, cp.rank * n + n)
        logits, _ = model(x[:, mine], rule)
        loss = F.cross_entropy(logits.flatten(0, 1), y[:, mine].flatten(), reduction="sum") / y.numel()
        loss.backward()
        shared = torch.cat([loss.detach().view(1), *(p.grad.view(-1) for p in model.parameters())])
        dist.all_reduce(shared)
        for p, whole in zip(model.parameters(), shared[1:].split([p.numel() for p in model.parameters()])):
            p.grad.copy_(whole.view_as(p))
        return shared[0].item()

    return step


def main():
    parser = argparse.ArgumentParser(description="Trains the model of lm.py on sequences that are cut over ranks.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence, a multiple of the ranks")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    if args.length % size:
        parser.error(f"--length {args.length} is no multiple of {size} ranks")
    data, _ = lm.read_text(None)
    source = lm.batches(data, 4, args.length, torch.Generator().manual_seed(0))
    batches = [next(source) for _ in range(args.steps)]

    model = make_model()
    expected = train(model, batches, alone(model))
    if dist.get_rank() == 0:
        print(f"{args.steps} steps of 4 x {args.length} tokens on {size} ranks; one process: loss {expected[0]:.4f} to {expected[-1]:.4f}")
    worst = 0
    for protocol in PROTOCOLS:
        try:
            cp = gdn.parallel.ContextParallel(protocol=protocol)
        except ValueError:
            continue  # one that does not fit the number of ranks, on all of them alike
        model = make_model()
        found = train(model, batches, together(model, cp))
        difference = max(abs(a - b) for a, b in zip(found, expected))
        worst = max(worst, difference)
        sent = torch.tensor([cp.traffic.bytes + cp.traffic.collective_bytes, cp.traffic.messages + cp.traffic.collectives]) / args.steps
        ranks = [torch.empty_like(sent) for _ in range(size)]
        dist.all_gather(ranks, sent)
        mean, most = torch.stack(ranks).mean(0), torch.stack(ranks).max(0).values
        if dist.get_rank() == 0:
            print(f"{str(cp.protocol):40} loss within {difference:.1e}; a rank sends {mean[0] / 1024:6.0f} KB a step, at most "
                  f"{most[0] / 1024:6.0f} KB in {most[1]:.0f} messages")
    dist.destroy_process_group()
    if worst > 1e-5:
        raise SystemExit(f"a loss differs by {worst:.1e}, more than 1e-5")


if __name__ == "__main__":
    main()
