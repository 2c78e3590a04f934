"""Learning rates, their schedule, and the running average of weights that is evaluated and exported."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

AVERAGE_HORIZON = 250  # steps
EMBEDDINGS = ("token_embedding", "position_embedding", "type_embedding", "embedding_norm")


@dataclass(frozen=True)
class Schedule:
    """Learning rates per group, and when they apply.

    For the first `head_steps` only the head learns. Then all groups warm up over `warmup_steps`; after `hold_steps`
    rates fall as 1 / sqrt(step). This schedule has no end, so a run can go on for as long as there is time. `cooldown`
    (first step, last step of the run) makes rates fall linearly to zero; exported weights gain from it.
    """

    head: float = 1e-3
    body: float = 3e-4
    embeddings: float = 3e-4
    head_alone: float = 2e-3
    head_steps: int = 100
    warmup_steps: int = 60
    hold_steps: int = 1500
    weight_decay: float = 0.01
    clip: float = 1.0
    cooldown: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.cooldown is not None and not 0 <= self.cooldown[0] < self.cooldown[1]:
            raise ValueError(f"a cooldown goes from a step to a later one, not {self.cooldown}")

    def factor(self, step: int) -> float:
        """Factor of all rates at `step`, counted within the stage (head alone, or everything)."""
        warmup = min(1.0, (step + 1) / self.warmup_steps)
        return warmup * min(1.0, (self.hold_steps / (step + 1)) ** 0.5)

    def cooling(self, step: int) -> float:
        """Factor of the cooldown at `step` of the run; 1 without a cooldown."""
        if self.cooldown is None:
            return 1.0
        first, last = self.cooldown
        return min(1.0, max(0.0, (last - step) / (last - first)))


def parameter_groups(backbone: nn.Module, schedule: Schedule) -> list[dict]:
    """Parameters by group (`name`, `params`, `base_rate`); vectors (biases, norms) carry no weight decay."""
    groups: dict[tuple[str, bool], list[nn.Parameter]] = {}
    for name, parameter in backbone.named_parameters():
        part = name.split(".")[0]
        group = "body" if part == "layers" else "embeddings" if part in EMBEDDINGS else "head"
        groups.setdefault((group, parameter.dim() > 1), []).append(parameter)
    return [
        {
            "name": group,
            "params": parameters,
            "base_rate": getattr(schedule, group),
            "lr": 0.0,
            "weight_decay": schedule.weight_decay if is_matrix and group != "embeddings" else 0.0,
        }
        for (group, is_matrix), parameters in groups.items()
    ]


class WeightAverage:
    """Exponential moving average of weights: less noisy than the last step's weights, at any time of a run.

    Updated every `every` steps. It averages over about a fifth of the steps so far, at most over `horizon` steps, so
    that early weights are soon forgotten.
    """

    def __init__(self, model: nn.Module, every: int = 8, horizon: int = AVERAGE_HORIZON) -> None:
        self.every = every
        self.horizon = horizon
        self.updates = 0
        self.weights: dict[str, Tensor] = {
            name: parameter.detach().clone() for name, parameter in model.named_parameters()
        }

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        if step % self.every:
            return
        share = max(5.0 / (self.updates + 5), self.every / self.horizon)
        for name, parameter in model.named_parameters():
            self.weights[name].lerp_(parameter.detach(), share)
        self.updates += 1
