"""Gated DeltaNet in plain PyTorch: the recurrence as it is written, and the chunk form that does the same with matrix products.

This is what a model runs on without a library; the demo measures libgdn against it. Both functions take the arguments of
gdn.chunk_gated_delta_rule that the demo uses.
"""

import torch
import torch.nn.functional as F


def prepare(q, k, v, g, beta, scale, A_log, dt_bias, l2norm, gate, sigmoid):
    """Norm, gate and sigmoid applied, heads of q and k repeated for each value head, heads before time: [B H T ...]."""
    if l2norm:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    if gate:
        g = -A_log.exp() * F.softplus(g if dt_bias is None else g + dt_bias)
    if sigmoid:
        beta = beta.sigmoid()
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    group = v.shape[2] // q.shape[2]
    q, k = q.repeat_interleave(group, 2), k.repeat_interleave(group, 2)
    return tuple(x.transpose(1, 2).float() for x in (q, k, v, g, beta))


def recurrent_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
                               use_beta_sigmoid_in_kernel=False, *, use_gate_in_kernel=False, A_log=None, dt_bias=None):
    """One token after the other."""
    dtype = v.dtype
    q, k, v, g, beta = prepare(q, k, v, g, beta, scale, A_log, dt_bias, use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel)
    B, H, T, K = k.shape
    S = q.new_zeros(B, H, K, v.shape[-1]) if initial_state is None else initial_state.float()
    o = []
    for t in range(T):
        S = S * g[:, :, t, None, None].exp()
        error = v[:, :, t] - torch.einsum("bhk,bhkv->bhv", k[:, :, t], S)
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, :, t], beta[:, :, t, None] * error)
        o.append(torch.einsum("bhk,bhkv->bhv", q[:, :, t], S))
    return torch.stack(o, 1).to(dtype), S if output_final_state else None


def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
                           use_beta_sigmoid_in_kernel=False, *, use_gate_in_kernel=False, A_log=None, dt_bias=None, chunk_size=64):
    """All chunks at once, except for the state, which passes from chunk to chunk.

    With b the sum of g up to a token of the chunk, the errors E (before beta) of a chunk that starts from state S solve

        E_i = v_i - exp(b_i) S^T k_i - sum_{j<i} beta_j exp(b_i - b_j) (k_i . k_j) E_j

    a unit triangular system, solved here for the part of beta E that does not depend on S and the one that multiplies it.
    """
    dtype, T, C = v.dtype, v.shape[1], chunk_size
    q, k, v, g, beta = prepare(q, k, v, g, beta, scale, A_log, dt_bias, use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel)
    B, H, _, K = k.shape
    pad = -T % C  # tokens with k = 0, beta = 0 and g = 0 change nothing
    q, k, v = (F.pad(x, (0, 0, 0, pad)).view(B, H, -1, C, x.shape[-1]) for x in (q, k, v))
    g, beta = (F.pad(x, (0, pad)).view(B, H, -1, C) for x in (g, beta))

    b = g.cumsum(-1)
    lower = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()
    # Masked before exp: above the diagonal the exponent is positive and may overflow.
    decay = (b[..., :, None] - b[..., None, :]).masked_fill(~lower, -torch.inf).exp()
    k_beta = k * beta[..., None]
    system = k_beta @ k.mT * decay  # solve_triangular takes the diagonal as ones and does not look above it
    solved = torch.linalg.solve_triangular(system, torch.cat((v * beta[..., None], k_beta * b[..., None].exp()), -1), upper=False, unitriangular=True)
    U, W = solved.split((v.shape[-1], K), -1)

    inside = q @ k.mT * decay
    q_decayed = q * b[..., None].exp()
    k_decayed = k * (b[..., -1:] - b)[..., None].exp()
    chunk_decay = b[..., -1, None, None].exp()
    S = q.new_zeros(B, H, K, v.shape[-1]) if initial_state is None else initial_state.float()
    o = []
    for n in range(q.shape[2]):
        written = U[:, :, n] - W[:, :, n] @ S
        o.append(q_decayed[:, :, n] @ S + inside[:, :, n] @ written)
        S = S * chunk_decay[:, :, n] + k_decayed[:, :, n].mT @ written
    o = torch.cat(o, 2)[:, :, :T].transpose(1, 2).to(dtype)
    return o, S if output_final_state else None
