"""Log-probabilities from the modelling files that model families publish: the recipe of `own_code_values.json`.

The files are not part of this repository. To make the values of a family again, fetch its modelling and configuration
file into one folder (`SOURCES` names repository and commit), install what they import (einops), and run

    python -m tests.support.own_code bd3lm FOLDER

from the repository. It prints the largest difference between the engine and the file on a few thousand masked tokens,
and writes the log-probabilities of the first `KEPT` of them, which `tests/backbones/test_own_code.py` compares with.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from diffscore_fast.backbones.loader import LoadedModel, load_model
from diffscore_fast.engine.plan import AttentionPattern, MaskPlan, Sequences
from diffscore_fast.engine.runner import Runner
from diffscore_fast.engine.windows import compose, split_at_blocks
from tests.support.checkpoints import SENTENCES
from tests.support.dit_checkpoints import save_dit_model

VALUES = Path(__file__).parent.parent / "backbones" / "own_code_values.json"
KEPT, ROWS = 60, 150
SOURCES = {
    "mdlm": "kuleshov-group/bd3lms@1c3e8f43d88d, models/hf, with cross_attn false",
    "bd3lm": "kuleshov-group/bd3lms@1c3e8f43d88d, models/hf",
}
# A model to compare: how its random checkpoint is saved, and under which attention.
CASES: dict[str, tuple[Callable[[Path], Path], AttentionPattern]] = {
    "mdlm": (lambda folder: save_dit_model("mdlm", folder), AttentionPattern("full")),
    "bd3lm": (lambda folder: save_dit_model("bd3lm", folder, 4), AttentionPattern("block", 4)),
    "bd3lm-8": (lambda folder: save_dit_model("bd3lm", folder, 8), AttentionPattern("block", 8)),
    "bd3lm-16": (lambda folder: save_dit_model("bd3lm", folder, 16), AttentionPattern("block", 16)),
}


def masked_rows(loaded: LoadedModel, count: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Context, target and mask of each row; contexts and targets end within blocks, and some contexts are empty."""
    generator = np.random.default_rng(0)
    found = []
    for row in range(count):
        text = " ".join(SENTENCES[index] for index in generator.permutation(len(SENTENCES)))
        ids = loaded.tokenizer.encode([text])[0].ids[: int(generator.integers(20, 62))]
        cut = int(generator.integers(0, 20)) if row % 3 else 0
        target = ids[cut:]
        mask = generator.random(len(target)) < generator.random()
        found.append((ids[:cut], target, mask | (np.arange(len(target)) == len(target) - 1)))
    return found


def engine_log_probs(loaded: LoadedModel, attention: AttentionPattern, rows: list) -> np.ndarray:
    """The engine's log-probabilities of all masked tokens, float32, in order; prefixes are cached and shared."""
    contexts, targets, masks = zip(*rows, strict=True)
    index, lengths = np.arange(len(rows)), np.array([len(target) for target in targets])
    sequences = Sequences.build(list(contexts), index, list(targets))
    plan = MaskPlan(index, np.zeros_like(index), lengths, np.concatenate(masks))
    spec = loaded.backbone.spec
    if attention.name == "block":
        plan = split_at_blocks(spec, attention, sequences, plan)
    runner = Runner(loaded.backbone, token_budget=100, cache_bytes=1 << 20)
    return runner.run(*compose(spec, attention, sequences, plan), attention)


def own_log_probs(logits_of: Callable[[list[int], list[int]], torch.Tensor], loaded: LoadedModel, rows: list) -> Any:
    """The same from a family's own code: `logits_of` takes the clean and the masked line, and returns [line, V]."""
    spec, found = loaded.backbone.spec, []
    for context, target, mask in rows:
        start = [] if spec.start_id is None else [spec.start_id]
        clean = [*start, *context.tolist(), *target.tolist()]
        base = len(clean) - len(target)
        masked = [spec.mask_id if place >= base and mask[place - base] else token for place, token in enumerate(clean)]
        logits = logits_of(clean, masked).double()
        logits[:, list(spec.excluded_ids)] = -torch.inf
        log_probs = logits.log_softmax(-1)
        found += [float(log_probs[base + place - spec.logit_shift, target[place]]) for place in np.flatnonzero(mask)]
    return np.array(found)


def bd3lm_logits(case: str, folder: Path, package: str) -> Callable[[list[int], list[int]], torch.Tensor]:
    """The file's training forward: the masked line, and after it the clean one where it reads in blocks."""
    own = importlib.import_module(f"{package}.modeling_bd3lm")
    stated = json.loads((folder / "config.json").read_text())
    fields = {name: value for name, value in stated.items() if name not in ("model_type", "architectures")}
    fields = {"attn_backend": "sdpa", "cross_attn": False, "var_min": False, **fields}

    def logits(clean: list[int], masked: list[int]) -> torch.Tensor:
        network = own.BD3LM(own.BD3LMConfig(**{**fields, "model_length": len(clean)})).eval()
        network.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
        line = [*masked, *clean] if fields["cross_attn"] else masked
        options = dict(timesteps=torch.zeros(1), return_dict=False, output_hidden_states=False)
        return network(torch.tensor([line]), **options)[0]

    return logits


def main(case: str, files: Path) -> None:
    """Compare the engine with the modelling files in a folder, and keep the first values."""
    sys.path.insert(0, str(files.parent))
    save, attention = CASES[case]
    family = case.partition("-")[0]
    readers = {"mdlm": bd3lm_logits, "bd3lm": bd3lm_logits}
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        folder = save(Path(scratch) / case)
        loaded = load_model(folder, dtype=torch.float32)
        rows = masked_rows(loaded, ROWS)
        own = own_log_probs(readers[family](case, folder, files.name), loaded, rows)
        found = engine_log_probs(loaded, attention, rows)
    print(f"{case}: {len(own)} tokens, largest difference {np.abs(found - own).max():.2g} nats")
    kept = json.loads(VALUES.read_text()) if VALUES.exists() else {}
    kept[case] = {"source": SOURCES[family], "log_probs": [round(value, 6) for value in own[:KEPT]]}
    VALUES.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).resolve())
