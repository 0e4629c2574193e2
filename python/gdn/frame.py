"""Frame GDN, the linear attention of video models of the SANA family, on one process or with its frames spread over several.

One step of the recurrence is a latent frame. With its tokens' keys k_s, values v_s, write strengths beta_s, and the frame's decay g:

    W  = g (Id - sum beta_s k_s k_s^T)      U  = sum beta_s v_s k_s^T      S <- S W + U        num = S q
    Wz = g (Id - sum beta_s kz_s kz_s^T)    uz = sum beta_s kz_s           z <- Wz z + uz      den = z.qz

``build_transitions`` makes the matrices, ``scan`` runs the recurrences, ``project`` reads the states. The scan takes any W; BH counts heads,
batch included. All of it has gradients. Tensors are float32, bfloat16 or float16 (float64 for checking gradients), states between calls and
between ranks float32 (float64). ``cp_frame_gdn_scan`` has the signature that Sana's training code calls.
"""

import operator
import os
from typing import NamedTuple, Optional

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import _lib, autograd, library  # noqa: F401  autograd registers the gradients

__all__ = ["CpFrameGdnScanResult", "Scan", "Summary", "build_transitions", "cp_frame_gdn_scan", "merge", "project", "scan", "summarize"]

_frame_fwd = library.operator("frame_fwd")
_frame_bwd = library.operator("frame_bwd")
_pullback = library.operator("frame_pullback")
_summary_fwd = library.operator("frame_summary_fwd")
_merge_fwd = library.operator("frame_merge_fwd")
_build_fwd = library.operator("frame_build_fwd")
_project_fwd = library.operator("frame_project_fwd")


class Scan(NamedTuple):
    """What ``scan`` returns; what was not asked for is None."""

    S: Tensor  # [BH, T, V, K], in W's dtype
    z: Optional[Tensor]  # [BH, T, K], in W's dtype
    final_state: Optional[Tensor]  # [BH, V, K] float32, on a group the same on every rank
    final_z: Optional[Tensor]  # [BH, K] float32, likewise


class Summary(NamedTuple):
    """What frames do to a state before them: S M + h and Mz z + hz."""

    h: Tensor  # [BH, V, K]
    M: Tensor  # [BH, K, K]
    hz: Optional[Tensor]  # [BH, K]
    Mz: Optional[Tensor]  # [BH, K, K]


class CpFrameGdnScanResult(NamedTuple):
    """What ``cp_frame_gdn_scan`` returns where truncate_to_active is given."""

    S_kv_all: Tensor  # (BH, T_local, D, D)
    S_z_all: Tensor  # (BH, T_local, D)
    terminal_state_kv: Tensor  # (BH, D, D), the same on every rank
    terminal_state_z: Tensor  # (BH, D), the same on every rank


def _or_none(t):
    """What an operator returns for an output that was not asked for is an empty vector."""
    return t if t.dim() > 1 else None


def _padding(W, active):
    """How many frames do not count."""
    T = W.shape[1] if W.dim() == 4 else 0
    if active is None:
        return 0
    active = operator.index(active)
    if not 0 <= active <= T:
        raise ValueError(f"gdn.frame: active is {active}, expected 0 to T={T}")
    return T - active


# ---------------------------------------------------------------- one process


def build_transitions(k, v, beta, decay, kz=None):
    """The matrices of the recurrences from the tokens of each frame.

    Args:
        k: [B, T*R, H, K] keys, R tokens a frame. Any strides do: ``x.permute(0, 3, 1, 2)`` of a (B, H, K, T*R) tensor is one.
        v: [B, T*R, H, V] values.
        beta: write strengths, [B, T*R, H], or [B, T, H] for one a frame.
        decay: [B, T, H] factors of the old state; 0 resets it.
        kz: [B, T*R, H, K] keys of the denominator (in Sana without rotation), or None: numerator only.

    Returns:
        (W [BH, T, K, K], U [BH, T, V, K], Wz, uz [BH, T, K]) in float32 (float64 for float64 keys); Wz and uz None without kz. W and Wz are
        symmetric in every bit.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    if decay.dim() != 3 or k.dim() != 4 or v.dim() != 4 or decay.shape[1] == 0 or k.shape[1] % decay.shape[1]:
        raise ValueError(f"gdn.frame.build_transitions: k has shape {list(k.shape)}, v {list(v.shape)} and decay {list(decay.shape)}, expected "
                         "[B, T*R, H, K], [B, T*R, H, V] and [B, T, H]")
    T = decay.shape[1]
    R = k.shape[1] // T
    if beta.dim() == 3 and beta.shape[1] == T != k.shape[1]:
        beta = beta.unsqueeze(2).expand(-1, -1, R, -1)
    elif beta.dim() != 3 or beta.shape[1] != k.shape[1]:
        raise ValueError(f"gdn.frame.build_transitions: beta has shape {list(beta.shape)}, expected [B, {k.shape[1]}, H] or [B, {T}, H]")
    else:
        beta = beta.unflatten(1, (T, R))
    made = _build_fwd(_frames(k, T, "k"), _frames(v, T, "v"), beta, decay, None if kz is None else _frames(kz, T, "kz"))
    return tuple(t.flatten(0, 1) if t.dim() > 1 else None for t in made)


def _frames(x, T, name):
    if x.dim() != 4 or x.shape[1] % T:
        raise ValueError(f"gdn.frame: {name} has shape {list(x.shape)}, expected [B, T*R, H, D] with T={T}")
    return x.unflatten(1, (T, x.shape[1] // T))


def project(q, S, qz=None, z=None):
    """What the tokens of each frame read.

    Args:
        q: [B, T*R, H, K] queries; any strides do.
        S: [BH, T, V, K] states, as ``scan`` returns them (for both directions of a bidirectional layer: their sum).
        qz: [B, T*R, H, K] queries of the denominator, or None.
        z: [BH, T, K], given with qz.

    Returns:
        (num [B, T*R, H, V] in q's dtype, den [B, T*R, H] float32 (float64), None without qz). A layer's output is num / (den + eps).

    Raises:
        ValueError: shapes or dtypes that do not fit, or qz without z.
    """
    if q.dim() != 4 or S.dim() != 4 or q.shape[0] == 0 or S.shape[0] != q.shape[0] * q.shape[2] or S.shape[1] == 0:
        raise ValueError(f"gdn.frame.project: q has shape {list(q.shape)} and S {list(S.shape)}, expected [B, T*R, H, K] and [B*H, T, V, K]")
    B, T, H = q.shape[0], S.shape[1], q.shape[2]
    if z is not None and z.dim() > 0 and z.shape[0] == B * H:
        z = z.unflatten(0, (B, H))
    num, den = _project_fwd(_frames(q, T, "q"), S.unflatten(0, (B, H)), None if qz is None else _frames(qz, T, "qz"), z)
    return num.flatten(1, 2), den.flatten(1, 2) if den.dim() > 1 else None


def scan(
    W,
    U,
    Wz=None,
    uz=None,
    initial_state=None,
    initial_z=None,
    *,
    active=None,
    reverse=False,
    exclusive=False,
    output_final_state=False,
    group=None,
    allgather_impl=None,
    recompute=False,
):
    """S <- S W + U and z <- Wz z + uz for each frame.

    Args:
        W: [BH, T, K, K] transitions. Any strides do.
        U: [BH, T, V, K] what each frame adds.
        Wz, uz: [BH, T, K, K] and [BH, T, K] for the denominator; both None: numerator only.
        initial_state, initial_z: [BH, V, K] and [BH, K] before the first frame, of any float dtype; None: 0. So a stream of chunks goes on
            from the final states of the last one.
        active: how many of the T frames count, from the first on; the rest is padding that leaves the state as it is, and what it holds is
            not read. None: all.
        reverse: from the last frame to the first.
        exclusive: S and z of a frame are those before it in the scan's order. A bidirectional layer is the sum of an inclusive scan and a
            reverse exclusive one over the same W and U.
        output_final_state: return the states after the scan's last frame too.
        group: the process group over whose ranks the frames are spread in rank order (a DeviceMesh of one dimension will do), each rank
            passing its own; T may differ between them and be 0. Results and gradients are those of one scan over all. The initial states
            are those before the whole and are read by the rank where the scan begins, which also gets their gradient; on the others it is 0.
            Every rank must call, and must run backward if one does, through any of the results; a result that a rank does not use makes no
            difference. One gather forward, one backward. None: this process alone.
        allgather_impl: what gathers, "collective", "list" or "p2p"; None: the environment variable CP_ALLGATHER_IMPL, else "collective".
        recompute: with a group, compute S again for the backward and keep only what came in: less memory, one more scan.

    Returns:
        Scan(S, z, final_state, final_z).

    Raises:
        ValueError: shapes, dtypes or an active that do not fit, or another allgather_impl.
        RuntimeError: another rank did not take part, in what the group's engine takes for too long.
    """
    padding = _padding(W, active)
    if group is None:
        S, z, state, final_z = _frame_fwd(W, U, Wz, uz, initial_state, initial_z, padding, reverse, exclusive, output_final_state,
                                          output_final_state and Wz is not None)
        return Scan(S, _or_none(z), _or_none(state), _or_none(final_z))
    ring = _Ranks(group, allgather_impl, reverse)
    return _spread(ring, W, U, Wz, uz, initial_state, initial_z, padding, reverse, exclusive, output_final_state, recompute)


def summarize(W, U, Wz=None, uz=None, *, active=None, reverse=False):
    """The composite of frames: what they do to any state before them.

    Args:
        W, U, Wz, uz, active, reverse: as in ``scan``.

    Returns:
        Summary(h, M, hz, Mz), float32 (float64 for a float64 W); hz and Mz None without Wz.
    """
    h, M, hz, Mz = _summary_fwd(W, U, Wz, uz, _padding(W, active), reverse, True, Wz is not None)
    return Summary(h, M, _or_none(hz), _or_none(Mz))


def merge(summaries, initial_state=None, initial_z=None, *, reverse=False):
    """The states after each of P parts of a sequence, from their composites.

    Args:
        summaries: Summary of tensors with a dimension of P in front: h [P, BH, V, K], M [P, BH, K, K], hz [P, BH, K], Mz [P, BH, K, K].
        initial_state, initial_z: [BH, V, K] and [BH, K] before the first part; None: 0.
        reverse: from the last part to the first.

    Returns:
        (S [P, BH, V, K], z [P, BH, K] or None), float32 (float64). Where a state is 0, M counts for nothing even if it has overflowed.
    """
    S, z = _merge_fwd(summaries.M, summaries.h, summaries.Mz, summaries.hz, initial_state, initial_z, reverse)
    return S, _or_none(z)


# ---------------------------------------------------------------- frames over ranks


class _Ranks:
    """The ranks of a group in the scan's order, and how they gather."""

    def __init__(self, group, allgather_impl, reverse):
        from .parallel.transport import Transport

        name = allgather_impl if allgather_impl is not None else os.environ.get("CP_ALLGATHER_IMPL") or "collective"
        if name not in _GATHERS:
            raise ValueError(f"gdn.frame: allgather_impl is {name!r}, expected one of {', '.join(map(repr, _GATHERS))}")
        self.transport = group if hasattr(group, "traffic") else Transport(group)
        self.size, self.reverse = self.transport.size, reverse
        self.place = self.size - 1 - self.transport.rank if reverse else self.transport.rank
        self._gather = _GATHERS[name]

    def gather(self, tensors, shapes):
        """The tensors of all ranks in one message from each, in the scan's order: [size, *shape] for each shape. None stands for zeros."""
        like = next(t for t in tensors if t is not None)
        sizes = [shape.numel() for shape in shapes]
        flat = torch.cat([like.new_zeros(n) if t is None else t.reshape(-1) for t, n in zip(tensors, sizes)])
        gathered = self._gather(self.transport, flat)
        gathered = gathered.flip(0) if self.reverse else gathered
        return [part.unflatten(1, shape) for part, shape in zip(gathered.split(sizes, dim=1), shapes)]


def _gather_list(transport, flat):
    made = [torch.empty_like(flat) for _ in range(transport.size)]
    with transport._explained("gathering from", tuple(range(transport.size))):
        dist.all_gather(made, flat, group=transport.group)
    return torch.stack(made)


def _gather_p2p(transport, flat):
    made = flat.new_empty(transport.size, flat.numel())
    made[transport.rank] = flat
    others = [r for r in range(transport.size) if r != transport.rank]
    transport.wait(transport.exchange([(flat, r) for r in others], [(made[r], r) for r in others]))
    return made


_GATHERS = {"collective": lambda transport, flat: transport.gather(flat), "list": _gather_list, "p2p": _gather_p2p}


def _spread(ring, W, U, Wz, uz, initial_state, initial_z, padding, reverse, exclusive, terminal, recompute):
    S, z, state, final_z = _Spread.apply(ring, (padding, reverse, exclusive), terminal, recompute, W, U, Wz, uz, initial_state, initial_z)
    return Scan(S, z, state, final_z)


class _Spread(torch.autograd.Function):
    """A scan over the ranks of a group: composites forward, one gather, and a scan from the state that the ranks before leave; backward
    the same in the other direction. One Function with all results, so that its gather runs whichever of them has a gradient."""

    @staticmethod
    def forward(ctx, ring, numbers, terminal, recompute, W, U, Wz, uz, initial_state, initial_z):
        padding, reverse, _ = numbers
        first, last = ring.place == 0, ring.place == ring.size - 1
        ctx.set_materialize_grads(False)
        ctx.ring, ctx.numbers, ctx.terminal = ring, numbers, terminal
        two = Wz is not None
        ctx.given = [None if t is None else (t.shape, t.dtype, t.device) for t in (initial_state, initial_z)]
        if not first:
            initial_state = initial_z = None
        made = None
        if first:  # its first pass is its last
            made = _frame_fwd(W, U, Wz, uz, initial_state, initial_z, *numbers, True, two)
            h, M, hz, Mz = made[2], None, made[3], None
        elif not last or terminal:
            h, M, hz, Mz = _summary_fwd(W, U, Wz, uz, padding, reverse, True, two)
        else:  # nobody asks what it does to a state
            _look(W, U, Wz, uz, *numbers)
            h = W.new_zeros(U.shape[0], *U.shape[2:], dtype=torch.float64 if W.dtype == torch.float64 else torch.float32)
            M = hz = Mz = None
        maps = None
        if ring.size == 1:
            ctx.gathered = None
            state, final_z = h, hz
        else:
            # Where there are but two and no terminal state, no state passes through a rank: nobody needs its M.
            through = ring.size > 2 or terminal
            B, V, K = h.shape
            shapes = [torch.Size(s) for s in ((B, V, K), *(((B, K, K),) if through else ()), *(((B, K),) if two else ()),
                                              *(((B, K, K),) if two and through else ()))]
            parts = [t for t, wanted in ((h, True), (M, through), (hz, two), (Mz, two and through)) if wanted]
            gathered = ring.gather(parts, shapes)
            h = gathered.pop(0)
            M = gathered.pop(0) if through else None
            hz = gathered.pop(0) if two else None
            Mz = gathered.pop(0) if two and through else None
            maps = (M, Mz)
            state = final_z = None
            if terminal or not first:
                states, zs = _prefixes(ring.size if terminal else ring.place, h, M, hz, Mz)
                if terminal:
                    state, final_z = states[-1].clone(), zs[-1].clone() if two else None
                if not first:
                    initial_state = states[ring.place - 1].clone()
                    initial_z = zs[ring.place - 1].clone() if two else None
        if made is None:
            made = _frame_fwd(W, U, Wz, uz, initial_state, initial_z, *numbers, False, False)
        S, z = made[0], made[1] if two else None
        fine = W.element_size() > 2
        ctx.recompute = recompute and fine
        ctx.dtypes = W.dtype, U.dtype, Wz.dtype if two else None, uz.dtype if two else None
        ctx.save_for_backward(W, None if fine and not recompute else U, Wz, None if fine and not recompute else uz, initial_state, initial_z,
                              None if ctx.recompute else S, None if ctx.recompute else z, *(maps or (None, None)))
        ctx.shapes = S.shape, U.shape
        return S, z, state if terminal else None, final_z if terminal and two else None

    @staticmethod
    @once_differentiable
    def backward(ctx, dS, dz, dstate, dfinal_z):
        W, U, Wz, uz, initial_state, initial_z, S, z, M, Mz = ctx.saved_tensors
        ring, numbers, two = ctx.ring, ctx.numbers, Wz is not None
        first, last = ring.place == 0, ring.place == ring.size - 1
        if ring.size > 1:
            B, T, V, K = ctx.shapes[0]
            e = ez = None
            if not first:
                zeros = W.new_zeros(()).expand(ctx.shapes[0])
                e, ez = _pullback(W, zeros if dS is None else dS, Wz, dz, *numbers)
            shapes = [torch.Size(s) for s in ((B, V, K), *(((B, K),) if two else ()))]
            parts = [e, ez] if two else [e]
            if ctx.terminal:
                shapes, parts = shapes * 2, parts + ([dstate, dfinal_z] if two else [dstate])
            if all(t is None for t in parts):
                parts[0] = W.new_zeros(shapes[0], dtype=torch.float64 if W.dtype == torch.float64 else torch.float32)
            gathered = ring.gather(parts, shapes)
            e, ez = gathered[0], gathered[1] if two else None
            dstate = dfinal_z = None
            if ctx.terminal:
                dstate, dfinal_z = gathered[2 if two else 1].sum(0), gathered[3].sum(0) if two else None
            if not last:
                after = slice(ring.place + 1, None)
                if M is None:
                    dstate, dfinal_z = e[1], ez[1] if two else None
                else:
                    suffixes, zs = _merge_fwd(M[after].transpose(-1, -2), e[after], Mz[after].transpose(-1, -2) if two else None,
                                              ez[after] if two else None, dstate, dfinal_z, True)
                    dstate, dfinal_z = suffixes[0], zs[0] if two else None
        if ctx.recompute:
            S, z = _frame_fwd(W, U, Wz, uz, initial_state, initial_z, *numbers, False, False)[:2]
            z = z if two else None
            U = uz = None
        made = _frame_bwd(W, S, U, initial_state, Wz, z, uz, initial_z, dS, dz, dstate, dfinal_z, *numbers)
        answer = [made[0], made[1], made[2] if two else None, made[3] if two else None]
        answer = [t if t is None else t.to(dtype) for t, dtype in zip(answer, ctx.dtypes)]
        for given, gradient in zip(ctx.given, made[4:]):
            shape, dtype, device = given or (None, None, None)
            answer.append(None if given is None else gradient.to(dtype) if first else torch.zeros(shape, dtype=dtype, device=device))
        return (None, None, None, None, *answer)


def _look(W, U, Wz, uz, *numbers):
    """Raises what the scan would raise, before others wait for this rank."""
    inputs = [W, U, Wz, uz, None, None]
    results = [U.new_empty(U.shape, dtype=W.dtype), None if uz is None else uz.new_empty(uz.shape, dtype=W.dtype), None, None]
    _lib.OPS["frame_fwd"].supports([None if t is None else library.view(t) for t in inputs + results], numbers)


def _prefixes(n, h, M, hz, Mz):
    """The states after each of the first n parts. The first begins from its own initial state already: its h is what it leaves."""
    if M is None:
        return h[:n], None if hz is None else hz[:n]
    S, z = _merge_fwd(M[:n], h[:n], None if Mz is None else Mz[:n], None if hz is None else hz[:n], None, None, False)
    return S, z if hz is not None else None


def cp_frame_gdn_scan(W_kv, U_kv, W_z, U_z, group, reverse=False, truncate_to_active=None, *, allgather_impl=None):
    """The scan of frames that are spread over the ranks of a group, as Sana's context parallelism calls it; ``scan`` does more.

    Args:
        W_kv, U_kv: (BH, T_local, D, D), this rank's frames: S <- S W + U.
        W_z: (BH, T_local, D, D), U_z: (BH, T_local, D): z <- W z + U. Both None: numerator only.
        group: the process group; None: the default one, or this process alone where torch.distributed is not initialised. All ranks have
            equally many frames where truncate_to_active is given.
        reverse: the state goes from the last rank to the first. Frames within a rank are taken as they come: the caller flips them.
        truncate_to_active: how many frames of all ranks count, 1 <= K <= T_local * ranks. Frames from there on leave the state as it is, and
            what they hold is not read. Not with reverse.
        allgather_impl: "collective", "list" or "p2p"; None: the environment variable CP_ALLGATHER_IMPL, else "collective".

    Returns:
        (S_kv_all, S_z_all), or with truncate_to_active CpFrameGdnScanResult, which has the terminal state too; in W_kv's dtype.

    Raises:
        NotImplementedError: truncate_to_active with reverse.
        ValueError: truncate_to_active out of range, shapes or dtypes that do not fit, another allgather_impl.
    """
    if truncate_to_active is not None and reverse:
        raise NotImplementedError("cp_frame_gdn_scan: truncate_to_active is for reverse=False only")
    alone = group is None and not (dist.is_available() and dist.is_initialized())
    ring = None if alone else _Ranks(group, allgather_impl, reverse)
    padding = 0
    if truncate_to_active is not None:
        count = operator.index(truncate_to_active)
        T, size, rank = W_kv.shape[1], 1 if alone else ring.size, 0 if alone else ring.transport.rank
        if not 1 <= count <= T * size:
            raise ValueError(f"cp_frame_gdn_scan: truncate_to_active is {count}, expected 1 to {T * size}, T_local={T} on {size} ranks")
        padding = T - min(max(count - rank * T, 0), T)
    terminal = truncate_to_active is not None
    if alone:
        S, z, state, final_z = _frame_fwd(W_kv, U_kv, W_z, U_z, None, None, padding, False, False, terminal, terminal and W_z is not None)
    else:
        S, z, state, final_z = _spread(ring, W_kv, U_kv, W_z, U_z, None, None, padding, False, False, terminal, False)
    if W_z is None:
        z = final_z = None
    if not terminal:
        return S, z
    return CpFrameGdnScanResult(S, z, state.to(W_kv.dtype), None if final_z is None else final_z.to(W_kv.dtype))
