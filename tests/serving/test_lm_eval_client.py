"""lm-evaluation-harness's own client `local-completions`, unmodified, against a running service."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from diffscore_fast.backbones.config import EMBEDDED_MODELS
from diffscore_fast.bounds.autoregressive import left_to_right
from tests.support.service import served

pytestmark = pytest.mark.extras
PAIRS = [
    ("The cat sat on", " the mat."),
    ("It rained", " all day in Puerto Rico."),
    ("Two people were", " found dead."),
]


@pytest.fixture
def tokenizer_folder(tmp_path):
    """The tokenizer of `mini`, for the client."""
    shutil.copy(EMBEDDED_MODELS["mini"] / "tokenizer.json", tmp_path)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "[CLS]", "eos_token": "[SEP]"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


@pytest.mark.parametrize("concurrent", [1, 4])
def test_the_client_gets_log_probabilities_of_continuations(mini, tokenizer_folder, concurrent):
    pytest.importorskip("lm_eval")
    pytest.importorskip("tenacity")  # of lm_eval[api]
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    with served() as (_, address):
        client = LocalCompletionsAPI(
            model="mini",
            base_url=f"{address}/v1/completions",
            tokenizer=str(tokenizer_folder),
            tokenizer_backend="huggingface",
            num_concurrent=concurrent,
            batch_size=2,
            max_length=2000,
        )
        asked = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(PAIRS)]
        found = client.loglikelihood(asked)
        rolling = client.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("The cat sat on the mat.",), 0)])
    for (context, continuation), (value, is_greedy) in zip(PAIRS, found, strict=True):
        start = len(mini.tokenize([context])[0])
        reading = left_to_right(mini.runner, mini.tokenize([context + continuation]))[0]
        ids = mini.tokenize([context + continuation])[0]
        assert value == pytest.approx(reading.log_probs[start:].sum(), abs=1e-4)
        assert is_greedy == bool(np.array_equal(ids[start:], reading.best[start:-1]))
    assert isinstance(rolling[0], float) and rolling[0] < 0
