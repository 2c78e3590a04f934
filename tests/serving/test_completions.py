"""`/v1/completions`: values by the chain rule, in the shape of OpenAI's clients; the real client is in extras."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diffscore_fast import DiffScorer
from diffscore_fast.serving.settings import Limits, Settings
from tests.support.checkpoints import save_checkpoint
from tests.support.service import post

TEXT = "The cat sat on the mat. It rained all day."
# As local-completions of lm-evaluation-harness 0.4.13 sends it.
ASKED = {"model": "mini", "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}


def asked(scorer: DiffScorer, prompt: Any, **changes: Any) -> list[dict[str, Any]]:
    answer = post(scorer, "/v1/completions", {**ASKED, "prompt": prompt, **changes})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def test_any_last_part_sums_to_its_log_probability_given_the_rest(mini):
    """log p(part | rest) = log p(whole) - log p(rest)."""
    ids = mini.tokenize([TEXT])[0].tolist()
    whole = asked(mini, [ids])[0]["logprobs"]["token_logprobs"]
    assert len(whole) == len(ids) + 1
    for cut in (1, 4, len(ids) - 1):
        rest = asked(mini, ids[:cut])[0]["logprobs"]["token_logprobs"]
        assert sum(whole[:-1]) - sum(rest[:-1]) == pytest.approx(sum(whole[cut:-1]), abs=1e-5)


def test_text_and_token_ids_give_the_same(mini):
    ids = mini.tokenize([TEXT])[0].tolist()
    by_text, by_ids = asked(mini, TEXT)[0], asked(mini, [ids])[0]
    assert by_text["logprobs"] == by_ids["logprobs"]
    assert [choice["index"] for choice in asked(mini, [TEXT, "A cat."])] == [0, 1]
    with_start = asked(mini, [[mini.spec.start_id, *ids]])[0]["logprobs"]
    assert with_start["token_logprobs"][0] is None and with_start["top_logprobs"][0] is None
    assert with_start["token_logprobs"][1:] == by_ids["logprobs"]["token_logprobs"]


def test_the_best_token_is_in_top_logprobs_and_is_generated(mini):
    choice = asked(mini, TEXT)[0]
    for value, top in zip(choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"], strict=True):
        assert value <= max(top.values()) and value in top.values()
    generated, value = choice["logprobs"]["tokens"][-1], choice["logprobs"]["token_logprobs"][-1]
    assert choice["text"].endswith(generated)
    alone = asked(mini, TEXT, echo=False)[0]
    assert (alone["text"], alone["logprobs"]["token_logprobs"]) == (generated, [value])
    without = asked(mini, TEXT, max_tokens=0)[0]["logprobs"]
    assert without["token_logprobs"] == choice["logprobs"]["token_logprobs"][:-1]
    assert len(without["top_logprobs"]) == len(without["tokens"])
    greedy = asked(mini, [[*mini.tokenize([TEXT])[0].tolist(), *mini.tokenize([generated])[0].tolist()]])[0]
    assert greedy["logprobs"]["token_logprobs"][-2] == value


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_tokens": None}, "max_tokens 0 or 1"),
        ({"max_tokens": 16}, "max_tokens 0 or 1"),
        ({"temperature": 0.7}, "temperature 0"),
        ({"logprobs": 5}, "logprobs 1"),
        ({"prompt": [[4]]}, "no token of a text"),
        ({"prompt": [[20000]]}, "no token of a text"),
        ({"prompt": [7] * 2047}, "takes 2046"),
        ({"prompt": "a\ud800"}, "surrogate"),
        ({"prompt": []}, "no rows"),
    ],
)
def test_what_this_service_does_not_do_is_refused(mini, changes, words):
    answer = post(mini, "/v1/completions", {**ASKED, "prompt": "a", **changes})
    assert answer.status_code in (400, 422)
    assert words in answer.json()["error"]["message"]


def test_a_model_without_a_chain_rule_is_refused_with_the_reason(tmp_path):
    torch.manual_seed(0)
    scorer = DiffScorer(save_checkpoint("bert", tmp_path))
    answer = post(scorer, "/v1/completions", {**ASKED, "prompt": "a"})
    assert answer.status_code == 400
    assert "one token after the other" in answer.json()["error"]["message"]


def test_prompts_count_against_the_limits(mini):
    assert (
        post(mini, "/v1/completions", {**ASKED, "prompt": ["a"] * 3}, Settings(limits=Limits(rows=2))).status_code
        == 413
    )
    limits = Settings(limits=Limits(tokens=100))
    assert post(mini, "/v1/completions", {**ASKED, "prompt": [7] * 50}, limits).status_code == 413
