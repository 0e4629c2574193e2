#!/usr/bin/env python3
"""Trains a byte-level language model of Gated DeltaNet layers on real text through libgdn, shows how it learned and lets it write.

usage: make demo [ARGS="--text FILE --seconds 60"]
Ctrl-C ends the training; what was learned until then is still shown.
"""

import argparse
import copy
import math
import os
import random
import signal
import statistics
import sys
import sysconfig
import time

import torch
import torch.nn.functional as F
from torch import nn

import gdn
import torch_gdn

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
WINDOW = 4  # of the short convolution


class RMSNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


def nothing(x, rows):
    return x.new_zeros(x.shape[0], rows, x.shape[2])


class Mixer(nn.Module):
    """Gated DeltaNet: projections, a short causal convolution, the delta rule, a gated norm."""

    def __init__(self, dim, heads, head_dim):
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        inner = heads * head_dim
        self.sizes = (3 * inner, inner, heads, heads)
        self.project = nn.Linear(dim, sum(self.sizes), bias=False)
        self.conv = nn.Parameter(torch.randn(3 * inner, 1, WINDOW) * WINDOW ** -0.5)
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        # softplus(dt_bias) between 0.001 and 0.1, so that heads forget at different speeds
        dt = torch.empty(heads).uniform_(math.log(0.001), math.log(0.1)).exp()
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
        self.norm = RMSNorm(head_dim)
        self.out = nn.Linear(inner, dim, bias=False)
        self.before = nothing  # the inputs of the convolution that come before the first; lm_parallel.py has them on other ranks

    def forward(self, x, rule, state):
        """state: None where nothing came before and nothing will follow, else (last inputs of the convolution, delta rule's state or None)."""
        qkv, z, g, beta = self.project(x).split(self.sizes, -1)
        recent, S = state or (self.before(qkv, WINDOW - 1), None)
        padded = torch.cat((recent, qkv), 1)
        mixed = F.silu(F.conv1d(padded.mT, self.conv, groups=qkv.shape[-1])).mT
        q, k, v = mixed.unflatten(2, (3, self.heads, self.head_dim)).unbind(2)
        o, S = rule(q, k, v, g, beta=beta, initial_state=S, output_final_state=state is not None, use_qk_l2norm_in_kernel=True,
                    use_beta_sigmoid_in_kernel=True, use_gate_in_kernel=True, A_log=self.A_log, dt_bias=self.dt_bias)
        y = self.out((self.norm(o) * F.silu(z.view_as(o))).flatten(2))
        return y, (padded[:, -(WINDOW - 1):], S)


class SwiGLU(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * hidden, bias=False), nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        gate, value = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * value)


class Block(nn.Module):
    def __init__(self, dim, heads, head_dim):
        super().__init__()
        self.norm1, self.mixer = RMSNorm(dim), Mixer(dim, heads, head_dim)
        self.norm2, self.mlp = RMSNorm(dim), SwiGLU(dim, 2 * dim)

    def forward(self, x, rule, state):
        y, state = self.mixer(self.norm1(x), rule, state)
        x = x + y
        return x + self.mlp(self.norm2(x)), state


class LanguageModel(nn.Module):
    def __init__(self, dim=128, layers=3, heads=2, head_dim=64):
        super().__init__()
        self.embed = nn.Embedding(256, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, head_dim) for _ in range(layers))
        self.norm = RMSNorm(dim)
        nn.init.normal_(self.embed.weight, std=0.02)  # small: it is the output layer too
        for block in self.blocks:
            for layer in (block.mixer.out, block.mlp.down):
                nn.init.normal_(layer.weight, std=(2 * layers * layer.in_features) ** -0.5)

    def forward(self, tokens, rule, states=None):
        """Logits, and the states after the last token if the states before the first were given (those of `start` for a new text)."""
        x = self.embed(tokens) * self.embed.embedding_dim ** 0.5
        after = []
        for i, block in enumerate(self.blocks):
            x, state = block(x, rule, states and states[i])
            after.append(state)
        return F.linear(self.norm(x), self.embed.weight), after if states else None

    def start(self):
        mixers = [block.mixer for block in self.blocks]
        return [(m.conv.new_zeros(1, WINDOW - 1, m.conv.shape[0]), None) for m in mixers]


def read_text(path):
    """Training and validation bytes: of a file the last 5 % are held out; of the standard library some whole files."""
    if path:
        with open(path, "rb") as f:
            data = f.read()
        cut = len(data) * 95 // 100
        return data[:cut], data[cut:]
    root = sysconfig.get_paths()["stdlib"]
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in ("site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"))
        # Tables of character sets are no prose.
        names += [os.path.join(folder, f) for f in sorted(files) if f.endswith(".py") and os.path.basename(folder) != "encodings"]
    random.Random(0).shuffle(names)
    texts = []
    for name in names:
        with open(name, "rb") as f:
            texts.append(f.read())
    held = max(1, len(texts) // 20)
    return b"\n".join(texts[held:]), b"\n".join(texts[:held])


def batches(data, batch, length, generator):
    """Random windows, without end: inputs and the same shifted by one."""
    data = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    offsets = torch.arange(length + 1)
    while True:
        at = torch.randint(len(data) - length, (batch, 1), generator=generator)
        window = data[at + offsets].long()
        yield window[:, :-1], window[:, 1:]


def loss_of(model, rule, x, y):
    return F.cross_entropy(model(x, rule)[0].flatten(0, 1), y.flatten())


def make_optimizer(model):
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=4e-3, betas=(0.9, 0.95), fused=True)


def train_step(model, optimizer, rule, x, y):
    loss = loss_of(model, rule, x, y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


@torch.no_grad()
def validate(model, data, batch, length, rounds=8):
    source = batches(data, batch, length, torch.Generator().manual_seed(1))
    return statistics.fmean(loss_of(model, gdn.chunk_gated_delta_rule, *next(source)).item() for _ in range(rounds))


class Progress:
    """One line that redraws itself; where nobody watches, a line now and then."""

    def __init__(self, seconds):
        self.seconds, self.live, self.last = seconds, sys.stdout.isatty(), -math.inf

    def show(self, elapsed, step, loss, rate):
        if elapsed - self.last < (0.2 if self.live else 10):
            return
        self.last = elapsed
        share = min(1, elapsed / self.seconds)
        done = round(30 * share)
        line = f"[{'#' * done}{'.' * (30 - done)}] {elapsed:4.0f} s  step {step:5}  loss {loss:.3f}  {rate:7,.0f} tokens/s"
        print(("\r" if self.live else "") + line, end="" if self.live else "\n", flush=True)

    def close(self):
        if self.live:
            print()


def train(model, data, seconds, batch, length):
    """Trains for that time; returns [(step, loss)]. Ctrl-C ends it earlier."""
    source = batches(data, batch, length, torch.Generator().manual_seed(0))
    optimizer = make_optimizer(model)
    peaks = [group["lr"] for group in optimizer.param_groups]
    stopped = []
    before = signal.signal(signal.SIGINT, lambda *_: stopped.append(True))  # the step under way is finished
    history, mean, progress, begin = [], None, Progress(seconds), time.perf_counter()
    try:
        while (elapsed := time.perf_counter() - begin) < seconds and not stopped:
            share = elapsed / seconds
            for group, peak in zip(optimizer.param_groups, peaks):
                group["lr"] = peak * min(1, (len(history) + 1) / 40) * (0.55 + 0.45 * math.cos(math.pi * share))
            loss = train_step(model, optimizer, gdn.chunk_gated_delta_rule, *next(source))
            history.append((len(history) + 1, loss))
            mean = loss if mean is None else mean + (loss - mean) * 0.1
            elapsed = time.perf_counter() - begin
            progress.show(elapsed, len(history), mean, len(history) * batch * length / elapsed)
    finally:
        signal.signal(signal.SIGINT, before)
        progress.close()
    return history, bool(stopped)


def plot(history, validation, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps, losses = zip(*history)
    window = max(1, len(losses) // 25)
    smooth = [statistics.fmean(losses[max(0, i - window):i]) for i in range(1, len(losses) + 1)]
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=0.8, label="each step")
    axes.plot(steps, smooth, color="tab:blue", label=f"mean of the last {window}")
    axes.plot(steps[-1:], [validation], "o", color="tab:red", label=f"held-out text: {validation:.3f}")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="Byte-level language model of Gated DeltaNet layers, trained with libgdn")
    axes.grid(alpha=0.3)
    axes.legend()
    os.makedirs(os.path.dirname(path), exist_ok=True)
    figure.savefig(path, dpi=120)


@torch.no_grad()
def write(model, prompt, count, temperature=0.7):
    """The prompt in chunk form, then a token at a time from the state: its cost does not grow with the text."""
    generator = torch.Generator().manual_seed(0)
    written = bytearray(prompt)
    logits, states = model(torch.tensor([list(prompt)]), gdn.chunk_gated_delta_rule, model.start())
    begin = time.perf_counter()
    for _ in range(count):
        token = torch.multinomial((logits[0, -1] / temperature).softmax(-1), 1, generator=generator)
        written.append(token.item())
        logits, states = model(token[None], gdn.fused_recurrent_gated_delta_rule, states)
    text = written.decode("utf-8", "replace")
    text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)  # a terminal would obey control characters
    return text, count / (time.perf_counter() - begin)


def compare(model, data, batch, length, rounds=5):
    """Median seconds of a training step with libgdn and with plain PyTorch, by turns on the same batches."""
    source = batches(data, batch, length, torch.Generator().manual_seed(2))
    model = copy.deepcopy(model)
    optimizer = make_optimizer(model)
    rules = (gdn.chunk_gated_delta_rule, torch_gdn.chunk_gated_delta_rule)
    times = {rule: [] for rule in rules}
    for turn in range(rounds + 1):
        x, y = next(source)
        for rule in rules:
            begin = time.perf_counter()
            train_step(model, optimizer, rule, x, y)
            if turn:  # the first warms up
                times[rule].append(time.perf_counter() - begin)
    return [statistics.median(times[rule]) for rule in rules]


def main():
    parser = argparse.ArgumentParser(description="Trains a small Gated DeltaNet language model through libgdn.")
    parser.add_argument("--text", metavar="FILE", help="what to learn (default: the source files of Python's standard library)")
    parser.add_argument("--seconds", type=float, default=120, help="how long to train (default 120)")
    parser.add_argument("--prompt", help="how the sample begins (default: 'def ', or the first bytes of held-out text with --text)")
    parser.add_argument("--out", default=os.path.join(ROOT, "build", "out", "demo.png"), help="where the loss curve goes")
    args = parser.parse_args()

    torch.manual_seed(0)
    batch, length = 8, 512
    data, held_out = read_text(args.text)
    if min(len(data), len(held_out)) <= length:
        parser.error(f"{args.text} is too short: {20 * (length + 1)} bytes are needed")
    model = LanguageModel()
    parameters = sum(p.numel() for p in model.parameters())
    print(f"text: {args.text or 'the Python standard library'}, {len(data) / 1e6:.1f} MB, and {len(held_out) / 1e6:.2f} MB held out")
    print(f"model: {len(model.blocks)} Gated DeltaNet layers, {parameters:,} parameters; {batch} x {length} bytes a step, "
          f"{torch.get_num_threads()} threads")

    before = validate(model, held_out, batch, length)
    history, stopped = train(model, data, args.seconds, batch, length)
    if not history:
        return
    after = validate(model, held_out, batch, length)
    print(f"held-out loss: {before:.3f} before, {after:.3f} after (nats per byte; {after / math.log(2):.2f} bits)")
    plot(history, after, args.out)
    print(f"loss curve: {os.path.relpath(args.out)}")
    if stopped:
        return

    prompt = args.prompt.encode() if args.prompt else held_out[:32] if args.text else b"def "
    text, rate = write(model, prompt, 400)
    print(f"\nsample, {rate:,.0f} bytes/s from the recurrent state:\n{'-' * 72}\n{text}\n{'-' * 72}\n")
    ours, plain = compare(model, data, batch, length)
    print(f"one training step: {ours * 1e3:.0f} ms with libgdn, {plain * 1e3:.0f} ms with the same model on plain PyTorch's chunk form "
          f"({plain / ours:.1f}x), medians of 5 by turns")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("\nstopped")
