"""Choices, defaults and limits, each stated once: the command line, the Python calls and the configurations use these.

Nothing here needs torch or numpy, so that `diffscore --help` starts at once. The formats of files stand in `io.record`
and `io.dialect`, and the templates in `text.templates`.
"""

from __future__ import annotations

from typing import Literal, get_args

# Scores: what is scored.
Direction = Literal["conditional", "marginal", "reverse", "bidirectional", "pmi"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
DEFAULT_DIRECTION: Direction = "conditional"
DEFAULT_ALPHA = 0.5  # weight of `conditional` in `bidirectional`

Overlength = Literal["error", "skip", "truncate-source"]
OVERLENGTH_POLICIES: tuple[Overlength, ...] = get_args(Overlength)
DEFAULT_OVERLENGTH: Overlength = "error"

MaskWords = Literal["all", "content", "function", "entities"]
MASK_WORDS: tuple[MaskWords, ...] = get_args(MaskWords)
DEFAULT_MASK_WORDS: MaskWords = "all"
DEFAULT_TAGGER = "en_core_web_sm"

Aggregate = Literal["max", "mean"]
AGGREGATES: tuple[Aggregate, ...] = get_args(Aggregate)
DEFAULT_AGGREGATE: Aggregate = "max"

DEFAULT_TEMPLATE = "plain"

# Scores: the draws, and what is made of them.
MaskRatios = Literal["grid", "stratified", "uniform"]
MASK_RATIOS: tuple[MaskRatios, ...] = get_args(MaskRatios)
DEFAULT_MASK_RATIOS: MaskRatios = "grid"

Masking = Literal["bernoulli", "count"]
MASKINGS: tuple[Masking, ...] = get_args(Masking)
DEFAULT_MASKING: Masking = "bernoulli"

Coupling = Literal["balanced", "independent"]
COUPLINGS: tuple[Coupling, ...] = get_args(Coupling)

EstimatorName = Literal["mean_logprob", "elbo", "weighted"]
ESTIMATORS: tuple[EstimatorName, ...] = get_args(EstimatorName)
DEFAULT_ESTIMATOR: EstimatorName = "mean_logprob"

# What the option `attention` takes: a pattern of the model, or "corrected", which is no pattern but an estimator of the
# score under `full`: all draws are read under `prefix`, and some of them under `full` as well.
AttentionOption = Literal["full", "prefix", "block", "corrected"]
ATTENTION_OPTIONS: tuple[AttentionOption, ...] = get_args(AttentionOption)
FullDraws = int | Literal["auto"]

DEFAULT_DRAWS = 8
DEFAULT_LEVELS = 10
DEFAULT_MAX_DRAWS = 128
DEFAULT_CALIBRATION_DRAWS = 20  # of the published grid: 18 forward passes
DEFAULT_CALIBRATION_ROWS = 64

# Comparisons.
DEFAULT_CONFIDENCE = 0.95
DEFAULT_RESAMPLES = 9_999
DEFAULT_DIFFERENCES = 3  # rows that `diffscore compare` prints

# Bounds.
GenerationName = Literal["any-order", "parallel"]
GENERATIONS: tuple[GenerationName, ...] = get_args(GenerationName)
DEFAULT_GENERATION: GenerationName = "any-order"

Method = Literal["auto", "exact", "estimate"]
METHODS: tuple[Method, ...] = get_args(Method)
DEFAULT_METHOD: Method = "auto"

SurrogateName = Literal["self", "single", "autoregressive"]
SURROGATES: tuple[SurrogateName, ...] = get_args(SurrogateName)
DEFAULT_SURROGATE: SurrogateName = "self"

OrderDesign = Literal["independent", "antithetic"]
ORDER_DESIGNS: tuple[OrderDesign, ...] = get_args(OrderDesign)
DEFAULT_ORDER_DESIGN: OrderDesign = "independent"

DEFAULT_BLOCK_SIZE = 8
DEFAULT_ORDERS = 32
DEFAULT_SURROGATE_ORDERS = 32
DEFAULT_Z = 3.0

# The model, and randomness.
DEFAULT_MODEL = "mini"
DEFAULT_DEVICE = "cpu"
DEFAULT_IMPLEMENTATION = "auto"
DTypeName = Literal["float32", "bfloat16", "float16", "int8"]
DTYPES: tuple[DTypeName, ...] = get_args(DTypeName)
DEFAULT_SEED = 0

# Who scores a file.
Engine = Literal["processes", "ray"]
ENGINES: tuple[Engine, ...] = get_args(Engine)
DEFAULT_ENGINE: Engine = "processes"

# Limits. All counts are far above what a score needs: a larger one is a typing error, and is refused by name before it
# can end in a lack of memory.
MAX_DRAWS = 10_000
MAX_LEVELS = 1_000
MAX_ORDERS = 100_000
MAX_STEPS = 10**15
MAX_RESAMPLES = 1_000_000
MAX_SAMPLED_ROWS = 1_000_000
MAX_Z = 30.0  # beyond, the tail of the normal distribution is close to the smallest float64
# Block sizes of an exact likelihood, which takes 2^L' - 1 states per block: the largest that method "auto" chooses (255
# states, about the cost of sampled orders), and the largest without `forced` (4,095).
MAX_AUTO_EXACT_BLOCK_SIZE = 8
MAX_EXACT_BLOCK_SIZE = 12
