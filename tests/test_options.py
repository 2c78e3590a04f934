"""The command line, the Python calls and the configurations have the same choices and the same defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import click
import pytest

from diffscore_fast import DiffScorer, LikelihoodBounds
from diffscore_fast.bounds.config import BoundsConfig
from diffscore_fast.bounds.table import BoundsTable
from diffscore_fast.cli.main import main
from diffscore_fast.engine.session import ScoringModel
from diffscore_fast.scoring.calibrate import calibrate
from diffscore_fast.scoring.compare import compare
from diffscore_fast.scoring.config import ReconstructionConfig, ScoreConfig
from diffscore_fast.scoring.mask_design import MaskDesign

# Python call: the commands with its options; options by another name; parameters that no option sets.
CALLS = {
    DiffScorer.score: (
        ("score", "compare"),
        {"references": "references_column", "items": "item_column"},
        {"sources", "candidates", "length_normalised", "token_scores", "progress"},
    ),
    LikelihoodBounds.estimate: (
        ("bound",),
        {"design": "order_design"},
        # `generation` follows from --steps, `cross_fitted` from --plain; `autoregressive` follows from the model there.
        {"texts", "generation", "cross_fitted", "autoregressive", "progress"},
    ),
    LikelihoodBounds.__init__: (("bound",), {}, {"options"}),
    BoundsTable.interval: (("bound",), {}, set()),
    compare: (("compare",), {}, {"a", "b"}),
    calibrate: (("calibrate",), {}, {"scorer", "sources", "candidates"}),
    ScoringModel.__init__: (("score", "bound", "compare", "calibrate"), {}, {"attention", "cache_bytes"}),
}
# Configurations: the Python call that they follow, fields by another name, and fields without a parameter of their own.
CONFIGS = {
    MaskDesign: (DiffScorer.score, {"ratios": "mask_ratios"}, set()),
    ReconstructionConfig: (DiffScorer.score, {}, {"design"}),
    # The model decides the default of `attention`, the references whether there is an `aggregate`, and the items
    # whether masks are shared.
    ScoreConfig: (DiffScorer.score, {}, {"reconstruction", "template", "attention", "aggregate", "masks_by_item"}),
    BoundsConfig: (LikelihoodBounds.estimate, {}, {"exact", "forced", "generation"}),
}
PAIRS = [(call, command) for call, (commands, _, _) in CALLS.items() for command in commands]


def options_of(command: str) -> dict[str, click.Parameter]:
    return {option.name: option for option in main.commands[command].params}


def default_of(option: click.Parameter) -> Any:
    """The value without the option; click has its own word for an option that has no default."""
    return option.to_info_dict()["default"]


def parameters_of(call: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return {name: item for name, item in inspect.signature(call).parameters.items() if name != "self"}


def choices_of(hint: Any) -> tuple[str, ...]:
    """The words that a type takes."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    return tuple(word for part in get_args(hint) for word in choices_of(part))


@pytest.mark.parametrize(("call", "command"), PAIRS, ids=lambda item: getattr(item, "__qualname__", item))
def test_the_command_line_has_the_defaults_and_choices_of_the_python_call(call, command):
    _, renamed, without = CALLS[call]
    options, hints = options_of(command), get_type_hints(call)
    for name, parameter in parameters_of(call).items():
        if name in without:
            continue
        option = options[renamed.get(name, name)]
        assert default_of(option) == parameter.default, name
        if isinstance(option.type, click.Choice) and name != "dtype":  # torch's dtypes have no Literal
            assert tuple(option.type.choices) == choices_of(hints[name]), name


@pytest.mark.parametrize("config", CONFIGS, ids=lambda item: item.__name__)
def test_a_configuration_has_the_defaults_and_choices_of_its_call(config):
    call, renamed, without = CONFIGS[config]
    parameters, hints, of_call = parameters_of(call), get_type_hints(config), get_type_hints(call)
    for item in fields(config):
        if item.name in without:
            continue
        name = renamed.get(item.name, item.name)
        assert item.default == parameters[name].default, item.name
        assert choices_of(hints[item.name]) == choices_of(of_call[name]), item.name


@pytest.mark.parametrize("call", [DiffScorer.score, LikelihoodBounds.estimate])
def test_docstrings_name_every_choice(call):
    hints = get_type_hints(call)
    for name in parameters_of(call):
        for choice in choices_of(hints[name]):
            assert f'"{choice}"' in (inspect.getdoc(call) or ""), f"{name}: {choice}"
