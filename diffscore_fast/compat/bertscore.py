"""bert-score's function (github.com/Tiiiger/bert_score, 0.3.13), with masked reconstruction for cosine similarity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from diffscore_fast.arguments import checked_column
from diffscore_fast.compat.rows import default_device, scores_or_nan
from diffscore_fast.errors import InputError
from diffscore_fast.scoring.references import listed
from diffscore_fast.scoring.scorer import DiffScorer

Scores = tuple[Tensor, Tensor, Tensor]


def score(
    cands: Sequence[str],
    refs: Sequence[str] | Sequence[Sequence[str]],
    model_type: str | None = None,
    num_layers: None = None,
    verbose: bool = False,
    idf: bool = False,
    device: str | None = None,
    batch_size: int = 64,
    nthreads: int = 4,
    all_layers: bool = False,
    lang: str | None = None,
    return_hash: bool = False,
    rescale_with_baseline: bool = False,
    baseline_path: None = None,
    use_fast_tokenizer: bool = False,
    **options: Any,
) -> Scores | tuple[Scores, str]:
    """Precision, recall and their mean as log-probabilities.

    P = S(candidate given reference): is what the candidate says in the reference? R = S(reference given candidate):
    is what the reference says in the candidate? F = (P + R) / 2, the geometric mean of probabilities. All are negative,
    in nats per token, and higher is better; no value means "equal texts", and none is rescaled to [0, 1].

    Parameters
    ----------
    cands : sequence of str
    refs : sequence of str, or of sequences of str
        One or several references per candidate; of several, the best P, R and F count, each on its own.
    model_type : str, optional
        A masked language model, as for `DiffScorer`; "mini" if not given.
    device : str, optional
        "cuda:0" where there is a GPU, else "cpu", if not given.
    lang : str, optional
        Only "en" chooses a model (`mini`); with `model_type` it is not used.
    return_hash : bool
        Also return the signature, as text.
    verbose, batch_size, nthreads, use_fast_tokenizer
        Accepted and not used.
    num_layers, idf, all_layers, rescale_with_baseline, baseline_path
        Have no counterpart: anything but the default is refused.
    **options
        Further keyword arguments of `DiffScorer.score`, such as `draws` and `seed`.

    Returns
    -------
    (P, R, F) : tuple of Tensor float32 [N]
        NaN, with a warning, where a row has no score. With `return_hash`: ((P, R, F), signature).

    Raises
    ------
    InputError, CheckpointError

    Examples
    --------
    >>> precision, recall, mean = score(["A cat sat."], ["The cat sat on the mat."], lang="en", draws=5)
    >>> bool((precision < 0) & (recall < 0))
    True
    """
    foreign = {
        "num_layers": num_layers,
        "idf": idf,
        "all_layers": all_layers,
        "rescale_with_baseline": rescale_with_baseline,
        "baseline_path": baseline_path,
    }
    for name, value in foreign.items():
        if value:
            raise InputError(f"{name} has no counterpart here: scores are log-probabilities, not cosine similarities")
    if model_type is None and lang not in (None, "en"):
        raise InputError(f"lang {lang!r}: the embedded model reads English; name another with model_type")
    cands, refs = checked_column("cands", cands), checked_column("refs", refs)
    if len(cands) != len(refs):
        raise InputError(f"{len(cands)} candidates but {len(refs)} references; they are paired one to one")
    groups: list[Sequence[str]] = [listed(item) for item in refs]
    scorer = DiffScorer(model_type or "mini", device=device or default_device())
    repeated = [candidate for candidate, group in zip(cands, groups, strict=True) for _ in group]
    flat = [reference for group in groups for reference in group]
    precision = torch.from_numpy(scores_or_nan(scorer, flat, repeated, direction="conditional", **options))
    recall = torch.from_numpy(scores_or_nan(scorer, flat, repeated, direction="reverse", **options))
    columns = torch.stack([precision, recall, (precision + recall) / 2])
    best = [
        part.amax(1) if part.shape[1] else columns.new_full((3,), torch.nan)
        for part in columns.split([len(group) for group in groups], dim=1)
    ]
    table = torch.stack(best, dim=1).float() if best else columns.float()
    found = table[0], table[1], table[2]
    if not return_hash:
        return found
    return found, str(scorer.score([], [], direction="bidirectional", **options).signature)
