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
from tests.support.block_checkpoints import save_block_model
from tests.support.checkpoints import SENTENCES
from tests.support.dit_checkpoints import save_dit_model

VALUES = Path(__file__).parent.parent / "backbones" / "own_code_values.json"
KEPT, ROWS = 60, 150
SOURCES = {
    "mdlm": "kuleshov-group/bd3lms@1c3e8f43d88d, models/hf, with cross_attn false",
    "bd3lm": "kuleshov-group/bd3lms@1c3e8f43d88d, models/hf",
    "sdar": "JetAstra/SDAR@c2041a833333, training/model/SDAR-4B-Chat, without flash_attn",
    "a2d": "ZHZisZZ/dllm@ca176752fbce, dllm/pipelines/a2d/models",
}
# A model to compare: how its random checkpoint is saved, and under which attention.
CASES: dict[str, tuple[Callable[[Path], Path], AttentionPattern]] = {
    "mdlm": (lambda folder: save_dit_model("mdlm", folder), AttentionPattern("full")),
    "bd3lm": (lambda folder: save_dit_model("bd3lm", folder, 4), AttentionPattern("block", 4)),
    "bd3lm-8": (lambda folder: save_dit_model("bd3lm", folder, 8), AttentionPattern("block", 8)),
    "bd3lm-16": (lambda folder: save_dit_model("bd3lm", folder, 16), AttentionPattern("block", 16)),
    "sdar": (lambda folder: save_block_model("sdar", folder), AttentionPattern("block", 4)),
    "sdar-16": (lambda folder: save_block_model("sdar", folder), AttentionPattern("block", 16)),
    "a2d-qwen3": (lambda folder: save_block_model("a2d-qwen3", folder), AttentionPattern("full")),
    "a2d-qwen3-block": (lambda folder: save_block_model("a2d-qwen3", folder), AttentionPattern("block", 32)),
    "a2d-qwen2-block": (lambda folder: save_block_model("a2d-qwen2", folder), AttentionPattern("block", 8)),
    "a2d-llama-block": (lambda folder: save_block_model("a2d-llama", folder), AttentionPattern("block", 8)),
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


def a2d_logits(case: str, folder: Path, package: str) -> Callable[[list[int], list[int]], torch.Tensor]:
    """The file's forward; in blocks, under a mask by which each block sees itself masked and those before it clean."""
    kind = case.split("-")[1]
    own = importlib.import_module(f"{package}.modeling_{kind}")
    name = "A2D" + kind.capitalize()
    config = getattr(own, f"{name}Config")(**_fields(folder))
    config._attn_implementation = "eager"
    network = getattr(own, f"{name}LMHeadModel")(config).eval()
    network.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
    size = CASES[case][1].block_size

    def forward(line: list[int]) -> torch.Tensor:
        mask = torch.zeros(1, 1, len(line), len(line))
        if size:
            mask.masked_fill_(~_block_causal(len(line), size), torch.finfo(torch.float32).min)
        return network(torch.tensor([line]), attention_mask=mask, use_cache=False).logits[0]

    return lambda clean, masked: _by_blocks(forward, clean, masked, size)


def sdar_logits(case: str, folder: Path, package: str) -> Callable[[list[int], list[int]], torch.Tensor]:
    """The file's forward under the mask of its `generate.py`, block after block."""
    own = importlib.import_module(f"{package}.modeling_sdar")
    network = own.SDARForCausalLM(own.SDARConfig(**_fields(folder))).eval()
    network.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
    size = CASES[case][1].block_size

    def forward(line: list[int]) -> torch.Tensor:
        mask = _block_causal(len(line), size)[None]
        places = torch.arange(len(line))[None]
        return network(torch.tensor([line]), attention_mask=mask, position_ids=places, use_cache=False).logits[0]

    return lambda clean, masked: _by_blocks(forward, clean, masked, size)


def _fields(folder: Path) -> dict[str, Any]:
    stated = json.loads((folder / "config.json").read_text())
    return {name: value for name, value in stated.items() if name not in ("model_type", "architectures")}


def _block_causal(length: int, size: int) -> torch.Tensor:
    block = torch.arange(length) // size
    return block[:, None] >= block[None, :]


def _by_blocks(forward: Callable, clean: list[int], masked: list[int], size: int) -> torch.Tensor:
    """Logits of each block in one dense forward over the clean blocks before it and the masked block itself."""
    if not size:
        return forward(masked)
    starts = range(0, len(clean), size)
    return torch.cat([forward([*clean[:start], *masked[start : start + size]])[start:] for start in starts])


def main(case: str, files: Path) -> None:
    """Compare the engine with the modelling files in a folder, and keep the first values."""
    sys.path.insert(0, str(files.parent))
    save, attention = CASES[case]
    family = case.partition("-")[0]
    readers = {"mdlm": bd3lm_logits, "bd3lm": bd3lm_logits, "a2d": a2d_logits, "sdar": sdar_logits}
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
