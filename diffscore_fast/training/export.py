"""Export of a run's checkpoint: weights in 8-bit rows, checked against the float weights, with a model card."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from string import Template

import torch

from diffscore_fast.backbones.loader import load_model
from diffscore_fast.errors import CheckpointError
from diffscore_fast.training.checkpoint import write_model_folder
from diffscore_fast.training.corpus import Corpus
from diffscore_fast.training.evaluation import Measured, held_out_losses
from diffscore_fast.training.optimiser import AVERAGE_HORIZON

MAX_CHANGE = 0.01  # nats per token that rounding to 8 bits may cost
CARD = Path(__file__).parent / "model_card.md"


def export_checkpoint(
    run: Path, train: Corpus, held_out: Corpus, out: Path, *, sequences: int, max_change: float = MAX_CHANGE
) -> str:
    """Write config.json, model.safetensors, tokenizer.json and MODEL_CARD.md to `out`; returns the checksum.

    Raises
    ------
    CheckpointError
        If rounding moves a held-out loss by more than `max_change`.
    """
    # A copy first: a running trainer may replace its checkpoint at any time.
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint, fresh = Path(scratch) / "checkpoint", Path(scratch) / "model"
        shutil.copytree(run / "checkpoint", checkpoint, ignore=shutil.ignore_patterns("raw*", "optimiser*"))
        exact = load_model(checkpoint / "model", dtype=torch.float32).bert
        checksum = write_model_folder(exact, checkpoint / "model", fresh, eight_bit=True)
        rounded = load_model(fresh, dtype=torch.float32).bert
        before, after = (held_out_losses(network, held_out, sequences=sequences) for network in (exact, rounded))
        for one, other in zip(before, after, strict=True):
            if abs(one.mean - other.mean) > max_change:
                raise CheckpointError(f"{one.setting}: {one.mean:.4f} nats become {other.mean:.4f} in 8 bits")
        settings = json.loads((run / "settings.json").read_text(encoding="utf-8"))
        progress = json.loads((checkpoint / "progress.json").read_text(encoding="utf-8"))
        spec = exact.spec
        card = Template(CARD.read_text(encoding="utf-8")).substitute(
            layers=spec.num_layers,
            hidden=spec.hidden_size,
            heads=spec.num_heads,
            pieces=f"{spec.vocab_size:,}",
            parameters=f"{sum(parameter.numel() for parameter in exact.parameters()) / 1e6:.1f}",
            megabytes=f"{(fresh / 'model.safetensors').stat().st_size / 1e6:.1f}",
            checksum=checksum,
            head_steps=settings[0]["schedule"]["head_steps"],
            horizon=AVERAGE_HORIZON,
            steps=f"{progress['step']:,}",
            tokens=f"{progress['tokens'] / 1e6:.2f}",
            hours=f"{progress['seconds'] / 3600:.1f}",
            settings="\n".join(json.dumps(part) for part in settings),
            articles=f"{held_out.last - train.first:,}",
            held_out=held_out.last - held_out.first,
            processor=f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads",
            sequences=sequences,
            losses=loss_table(after, before),
        )
        (fresh / "MODEL_CARD.md").write_text(card, encoding="utf-8")
        out.mkdir(parents=True, exist_ok=True)
        for path in fresh.iterdir():
            shutil.move(path, out / path.name)
            (out / path.name).chmod(0o644)  # safetensors makes files for their owner alone
    return checksum


def loss_table(rounded: list[Measured], exact: list[Measured]) -> str:
    """A Markdown table with one row per setting."""
    lines = ["| setting | nats | 95% interval | before rounding |", "|---|---|---|---|"]
    for one, other in zip(rounded, exact, strict=True):
        low, high = one.interval()
        lines.append(f"| {one.setting} | {one.mean:.3f} | {low:.3f} to {high:.3f} | {other.mean:.3f} |")
    return "\n".join(lines)
