"""Lower and tangent upper bounds on log-evidence, per block, from one pass over its draws."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diffscore_fast.ops.extension import cpu_unavailable
from diffscore_fast.ops.log_mean_exp import check_segments, segment_log_sums
from diffscore_fast.ops.registry import AUTO, Implementation, Operation, anywhere
from diffscore_fast.ops.triton_kernels import kernels, on_its_device, triton_unavailable


@dataclass(frozen=True)
class EvidenceBounds:
    """Per block, float64 [B] each.

    Parameters
    ----------
    lower : Tensor
        Its expectation is at most log p(x).
    upper_plain : Tensor
        p_hat is the mean of fold 0, psi the mean of the other folds.
    upper : Tensor
        Cross-fitted: the average over folds, each in turn as p_hat. The expectation of both upper bounds is at least
        log p(x). They are +inf where psi is 0, since no tangent exists there.
    """

    lower: Tensor
    upper_plain: Tensor
    upper: Tensor


def evidence_bounds(log_p: Tensor, folds: int, segments: Tensor, *, implementation: str = AUTO) -> EvidenceBounds:
    """Bounds on log p(x) from draws of log p(x | z), in the log domain throughout. Not differentiable.

    lower = log (1/n sum_k p(x | z_k)),  upper = log psi + (p_hat - psi) / psi (TUBE).

    The logarithm is concave: log w <= log psi + (w - psi) / psi for any psi > 0. With psi independent of an unbiased
    p_hat, the right side at w = p_hat has expectation at least log p(x). `EvidenceBounds` says which folds are which.

    Parameters
    ----------
    log_p : Tensor [N]
        log p(x | z) of every draw; read as float64.
    folds : int
        Number F >= 2 of independent folds: the draws of a block are F consecutive runs of equal length.
    segments : Tensor [B + 1], int64
        Block b owns draws segments[b] .. segments[b + 1]; their number is a positive multiple of `folds`.
    implementation : str
        "auto", or a name; a named one runs or raises.
    """
    log_p = log_p.detach()
    check_segments("evidence_bounds", log_p, segments)
    counts = segments.diff()
    wrong = (counts <= 0) | (counts % folds != 0) if folds >= 2 else torch.ones_like(counts, dtype=torch.bool)
    if bool(wrong.any()):
        block = int(wrong.nonzero()[0, 0])
        raise ValueError(
            f"evidence_bounds: block {block} has {int(counts[block])} draws; they must be a positive multiple of "
            f"folds = {folds}, and folds at least 2"
        )
    chosen = EVIDENCE_BOUNDS.resolve(log_p.device, implementation)
    return EvidenceBounds(*EVIDENCE_BOUNDS.run(chosen, log_p.double().contiguous(), folds, segments.contiguous()))


def _reference(log_p: Tensor, folds: int, segments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    counts = segments.diff()
    blocks, each = len(counts), counts // folds
    fold_sizes = each.repeat_interleave(folds)
    fold_of = torch.repeat_interleave(torch.arange(blocks * folds, device=log_p.device), fold_sizes)
    sums = segment_log_sums(log_p, fold_of, blocks * folds)[0].view(blocks, folds)
    lower = torch.logsumexp(sums, dim=1) - torch.log(counts.double())
    uppers = []
    for fold in range(folds):
        others = [other for other in range(folds) if other != fold]
        log_psi = torch.logsumexp(sums[:, others], dim=1) - torch.log((each * (folds - 1)).double())
        log_hat = sums[:, fold] - torch.log(each.double())
        tangent = log_psi + torch.exp(log_hat - log_psi) - 1.0
        uppers.append(torch.where(log_psi > -torch.inf, tangent, torch.inf))
    stacked = torch.stack(uppers)
    return lower, stacked[0], stacked.mean(dim=0)


def _cpu(log_p: Tensor, folds: int, segments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.diffscore_fast.evidence_bounds(log_p, folds, segments)


@on_its_device
def _triton(log_p: Tensor, folds: int, segments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return kernels("evidence_bounds").run(log_p, folds, segments)


EVIDENCE_BOUNDS = Operation(
    "evidence_bounds",
    [
        Implementation("cpu", _cpu, cpu_unavailable),
        Implementation("triton", _triton, triton_unavailable),
        Implementation("reference", _reference, anywhere),
    ],
)
