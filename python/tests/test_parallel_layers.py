"""The layers of gdn.nn over ranks, held to the same layer in one process."""

import copy

import pytest

torch = pytest.importorskip("torch")

import reference  # noqa: E402
from ranks import simulate  # noqa: E402

from gdn import nn, parallel  # noqa: E402

LAYERS = {
    "gdn": lambda: nn.GatedDeltaNet(24, num_v_heads=4, num_k_heads=2, head_k_dim=8, head_v_dim=6),
    "kda": lambda: nn.KimiDeltaAttention(24, num_heads=2, num_v_heads=4, head_k_dim=8, head_v_dim=6),
    "kda softplus": lambda: nn.KimiDeltaAttention(24, num_heads=2, head_k_dim=8, head_v_dim=6, gate_lower_bound=None, use_full_rank_gate=False),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("protocol", ["p2p", "recursive_doubling", parallel.hybrid(2)])
@pytest.mark.parametrize("offsets, lengths", [([0, 5, 5, 60, 66], [20, 2, 14, 30]), ([0, 66], [30, 1, 1, 34])])
def test_layers(name, protocol, offsets, lengths):
    layer = LAYERS[name]()
    x, dy = torch.randn(1, 66, 24), torch.randn(1, 66, 24)

    def run(layer, x, dy, **options):
        x = x.clone().requires_grad_()
        y = layer(x, **options)
        gradients = torch.autograd.grad(y, [x, *layer.parameters()], dy)
        return {"y": y.detach(), "dx": gradients[0], **{f"d {n}": g for (n, _), g in zip(layer.named_parameters(), gradients[1:])}}

    def work(transport):
        begin = sum(lengths[:transport.rank])
        mine = slice(begin, begin + lengths[transport.rank])
        cp = parallel.ContextParallel(protocol=protocol, transport=transport)
        bound = cp.bind(parallel.SequencePlan(offsets, lengths, cp.rank))
        return run(copy.deepcopy(layer), x[:, mine], dy[:, mine], cp=bound)

    want = run(layer, x, dy, cu_seqlens=torch.tensor(offsets))
    ranks, _ = simulate(len(lengths), work)
    for key, t in want.items():
        found = [rank[key] for rank in ranks]
        reference.check(key, t, torch.cat(found, 1) if key in ("y", "dx") else sum(found), 2e-5)
