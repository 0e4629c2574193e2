#!/usr/bin/env python3
"""Draws docs/parallel-cost.svg: what gdn.parallel.cost expects an exchange of states to cost, up to 1,024 ranks.

usage: PYTHONPATH=python python build/parallel_cost.py
"""

import os

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from gdn.parallel import cost

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
RANKS = [2 ** i for i in range(1, 11)]
SHAPES = {"8 heads, K = V = 64: a state of 128 KB": (1, 8, 64, 64), "32 heads, K = V = 128: a state of 2 MB": (1, 32, 128, 128)}


def best_width(P, shape):
    widths = [("grouped", w) for w in RANKS if 1 < w < P]
    return min((cost.estimate(w, P - 1, P, shape) for w in widths), default=None)


def main():
    plt.rcParams.update({"svg.hashsalt": "libgdn", "svg.fonttype": "none"})
    figure, axes = plt.subplots(2, 2, figsize=(10, 7), sharex=True, layout="constrained")
    for column, (title, shape) in enumerate(SHAPES.items()):
        lines = {name: [(P, cost.estimate(name, P - 1, P, shape)) for P in RANKS] for name in ("p2p", "all_gather", "recursive_doubling")}
        lines["grouped, its best width"] = [(P, found) for P in RANKS if (found := best_width(P, shape))]
        for name, points in lines.items():
            ranks = [P for P, _ in points]
            axes[0][column].plot(ranks, [e.seconds * 1e3 for _, e in points], marker=".", label=name)
            axes[1][column].plot(ranks, [e.bytes / 2 ** 20 for _, e in points], marker=".", label=name)
        axes[0][column].set(title=title, ylabel="ms until the last rank has its state" if column == 0 else "")
        axes[1][column].set(xlabel="ranks that one document lies on", ylabel="MB that the busiest rank receives" if column == 0 else "")
    for axis in axes.flat:
        axis.set(xscale="log", yscale="log")
        axis.minorticks_off()
        axis.set_xticks(RANKS, [str(P) for P in RANKS])
        axis.grid(alpha=0.3)
    axes[0][0].legend()
    m = cost.Machine()
    figure.suptitle(f"One direction of one layer: latency {m.latency * 1e6:.0f} us, {m.bandwidth / 1e9:.0f} GB/s, {m.flops / 1e12:.0f} TFLOP/s")
    figure.savefig(os.path.join(ROOT, "docs", "parallel-cost.svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
