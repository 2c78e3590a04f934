// Log-softmax of the vocabulary projection, gathered at the target; logits live in a cache-sized tile only.
//
// Hidden states are packed once into panels of 24 rows, the lanes. Tiles of 64 vocabulary rows are read where they lie
// and multiplied with a panel into a [64, 24] tile, which the online softmax absorbs while it is in cache. The
// vocabulary is cut into at most 64 splits by its size alone; their states are merged in order.
#include <ATen/core/Tensor.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "convert.h"
#include "inner.h"
#include "parallel.h"

namespace diffscore {
namespace {

constexpr int64_t kTileRows = 64;      // vocabulary rows in one tile
constexpr int64_t kMostSplits = 64;
constexpr int64_t kLeastSplit = 256;   // vocabulary rows; below, merging would cost more than it shares out
constexpr int64_t kPanelsAtOnce = 42;  // panels that one unit of work takes through a split
constexpr int64_t kWideDepth = 1024;   // beyond, a tile of the weight leaves the second-level cache
constexpr int64_t kPanelsTogether = 14;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Problem {
  int64_t rows, depth, vocabulary, panels, splits, split_rows;
  LogitTransform transform;
  std::vector<int64_t> excluded;
  const float* bias;      // [V] or null
  const int64_t* targets; // [N]
  bool statistics;

  int lanes_in(int64_t panel) const { return static_cast<int>(std::min(kLanes, rows - panel * kLanes)); }
};

// What the splits leave behind: [splits, panels * kLanes] each.
struct Partial {
  Scratch maximum, sum, weighted, above;
  explicit Partial(int64_t size, bool statistics)
      : maximum(size), sum(size), weighted(statistics ? size : 0), above(statistics ? size : 0) {}
};

void pack_hidden(const InnerKernels& inner, const RowReader& hidden, const int64_t* rows, const Problem& problem,
                 float* packed) {
  share_units(problem.panels, [&](const auto& claim) {
    Scratch converted(hidden.is_float() ? 0 : kLanes * problem.depth), spare(problem.depth);
    std::fill_n(spare.get(), problem.depth, 0.0f);
    const float* from[kLanes];
    for (int64_t panel; claim(panel);) {
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        if (lane >= problem.lanes_in(panel)) {
          from[lane] = spare.get();
        } else if (hidden.is_float()) {
          from[lane] = hidden.floats(rows[panel * kLanes + lane]);
        } else {
          from[lane] = converted.get() + lane * problem.depth;
          hidden.read(rows[panel * kLanes + lane], converted.get() + lane * problem.depth);
        }
      }
      inner.gather(from, problem.depth, 1.0f, packed + panel * problem.depth * kLanes, kLanes / kVector);
    }
  });
}

// Products [rows, kLanes] of `rows` vocabulary rows, [rows, depth] at `weight`, with each of `count` panels. For a wide
// model the walk over depth is outermost: a [64, 384] piece of the weight then stays in the second-level cache while
// all panels meet it. A product's sums are the same for every count.
void tile_products(const InnerKernels& inner, const Problem& problem, const float* weight, int64_t stride, int64_t rows,
                   const float* packed, int64_t first_panel, int64_t count, float* tiles) {
  for (int64_t k = 0; k < problem.depth; k += kDepthBlock) {
    const int64_t depth = std::min(kDepthBlock, problem.depth - k);
    for (int64_t p = 0; p < count; ++p) {
      inner.product(weight + k, stride, 1, rows, depth, packed + ((first_panel + p) * problem.depth + k) * kLanes,
                    tiles + p * kTileRows * kLanes, k > 0, vectors_for(problem.lanes_in(first_panel + p)));
    }
  }
}

// Logits in place of the products of vocabulary rows `first` .. first + rows with one panel.
void finish_logits(const InnerKernels& inner, const Problem& problem, int64_t first, int64_t rows, int vectors,
                   float* tile) {
  inner.logits(tile, rows, problem.bias ? problem.bias + first : nullptr, problem.transform, vectors);
  for (const int64_t id : problem.excluded) {
    if (id >= first && id < first + rows) std::fill_n(tile + (id - first) * kLanes, kLanes, -kInfinity);
  }
}

// The targets' own logits, before the pass that ranks them; the same sums in the same order as in the tiles.
void target_logits(const InnerKernels& inner, const Problem& problem, const RowReader& weight, const float* packed,
                   float* target) {
  share_units(problem.panels, [&](const auto& claim) {
    Scratch row(problem.depth), tile(kLanes);
    for (int64_t panel; claim(panel);) {
      const int lanes = problem.lanes_in(panel);
      for (int64_t lane = 0; lane < lanes; ++lane) {
        const int64_t id = problem.targets[panel * kLanes + lane];
        weight.read(id, row.get());
        tile_products(inner, problem, row.get(), problem.depth, 1, packed, panel, 1, tile.get());
        finish_logits(inner, problem, id, 1, vectors_for(lanes), tile.get());
        target[panel * kLanes + lane] = tile.get()[lane];
      }
    }
  });
}

void walk_vocabulary(const InnerKernels& inner, const Problem& problem, const RowReader& weight, const float* packed,
                     float* target, Partial& partial) {
  const int64_t at_once = problem.splits < 16 ? 4 : kPanelsAtOnce;
  const int64_t groups = (problem.panels + at_once - 1) / at_once;
  const int64_t padded = problem.panels * kLanes;
  share_units(problem.splits * groups, [&](const auto& claim) {
    const int64_t together = problem.depth > kWideDepth ? kPanelsTogether : 1;
    Scratch tiles(together * kTileRows * kLanes), converted(weight.is_float() ? 0 : kTileRows * problem.depth);
    for (int64_t unit; claim(unit);) {
      const int64_t split = unit / groups, first_panel = unit % groups * at_once;
      const int64_t last_panel = std::min(first_panel + at_once, problem.panels);
      const int64_t begin = split * problem.split_rows;
      const int64_t end = std::min(begin + problem.split_rows, problem.vocabulary);
      float* maximum = partial.maximum.get() + split * padded;
      float* sum = partial.sum.get() + split * padded;
      float* weighted = problem.statistics ? partial.weighted.get() + split * padded : nullptr;
      float* above = problem.statistics ? partial.above.get() + split * padded : nullptr;
      for (int64_t at = first_panel * kLanes; at < last_panel * kLanes; ++at) {
        maximum[at] = -kInfinity;
        sum[at] = 0.0f;
        if (problem.statistics) weighted[at] = above[at] = 0.0f;
      }
      for (int64_t first = begin; first < end; first += kTileRows) {
        const int64_t rows = std::min(kTileRows, end - first);
        const float* from = converted.get();
        int64_t stride = problem.depth;
        if (weight.is_float()) {
          from = weight.floats(first);
          stride = weight.stride();
        } else {
          for (int64_t r = 0; r < rows; ++r) weight.read(first + r, converted.get() + r * problem.depth);
        }
        for (int64_t group = first_panel; group < last_panel; group += together) {
          const int64_t count = std::min(together, last_panel - group);
          tile_products(inner, problem, from, stride, rows, packed, group, count, tiles.get());
          for (int64_t panel = group; panel < group + count; ++panel) {
            const int lanes = problem.lanes_in(panel), vectors = vectors_for(lanes);
            const int64_t at = panel * kLanes;
            float* tile = tiles.get() + (panel - group) * kTileRows * kLanes;
            finish_logits(inner, problem, first, rows, vectors, tile);
            for (int64_t lane = 0; lane < lanes; ++lane) {
              const int64_t place = problem.targets[at + lane] - first;
              if (place >= 0 && place < rows) target[at + lane] = tile[place * kLanes + lane];
            }
            inner.absorb(tile, rows,
                         {maximum + at, sum + at, weighted ? weighted + at : nullptr, above ? above + at : nullptr,
                          target + at},
                         vectors);
          }
        }
      }
    }
  });
}

struct Outputs {
  at::Tensor log_prob, log_sum_exp, entropy, rank;
};

// Ordered merge of the splits, in float64: log p = (z_target - m) - log sum, so that a common offset costs no digits.
Outputs merge(const Problem& problem, const Partial& partial, const float* target, const at::TensorOptions& options) {
  const int64_t rows = problem.rows, padded = problem.panels * kLanes, kept = problem.statistics ? rows : 0;
  Outputs out{at::empty({rows}, options), at::empty({rows}, options), at::empty({kept}, options),
              at::empty({kept}, options.dtype(at::kLong))};
  for (int64_t row = 0; row < rows; ++row) {
    float maximum = -kInfinity;
    bool undefined = false;
    for (int64_t split = 0; split < problem.splits; ++split) {
      maximum = std::max(maximum, partial.maximum.get()[split * padded + row]);
      undefined |= std::isnan(partial.sum.get()[split * padded + row]);
    }
    double sum = 0.0, weighted = 0.0, above = 0.0;
    for (int64_t split = 0; split < problem.splits; ++split) {
      const int64_t at = split * padded + row;
      const double moved = double(partial.maximum.get()[at]) - maximum;
      if (!(moved > -kInfinity)) continue;  // nothing but -inf was seen there
      const double factor = std::exp(moved);
      sum += partial.sum.get()[at] * factor;
      if (problem.statistics) {
        weighted += (partial.weighted.get()[at] + moved * partial.sum.get()[at]) * factor;
        above += partial.above.get()[at];
      }
    }
    const double log_sum = undefined ? std::numeric_limits<double>::quiet_NaN() : std::log(sum);
    const bool impossible = target[row] == -kInfinity && !undefined;
    out.log_prob.data_ptr<float>()[row] =
        impossible ? -kInfinity : static_cast<float>(double(target[row]) - maximum - log_sum);
    out.log_sum_exp.data_ptr<float>()[row] = static_cast<float>(maximum + log_sum);
    if (problem.statistics) {
      out.entropy.data_ptr<float>()[row] = static_cast<float>(log_sum - weighted / sum);
      out.rank.data_ptr<int64_t>()[row] = static_cast<int64_t>(above);
    }
  }
  return out;
}

void check(const at::Tensor& hidden, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
           const at::Tensor& targets, const std::optional<at::Tensor>& rows, int64_t vocab_size,
           const std::optional<at::Tensor>& weight_scale) {
  const auto real = [](const at::Tensor& t) {
    return t.scalar_type() == at::kFloat || t.scalar_type() == at::kBFloat16 || t.scalar_type() == at::kHalf;
  };
  TORCH_CHECK(hidden.dim() == 2 && hidden.size(1) > 0 && real(hidden),
              "masked_logprob: hidden must be [N, D] in float32, bfloat16 or float16; got ", hidden.sizes(), " ",
              hidden.scalar_type());
  TORCH_CHECK(weight.dim() == 2 && weight.size(1) == hidden.size(1), "masked_logprob: weight must be [V, ",
              hidden.size(1), "]; got ", weight.sizes());
  TORCH_CHECK(weight_scale ? weight.scalar_type() == at::kChar : real(weight),
              "masked_logprob: weight must be float32, bfloat16 or float16, or int8 with weight_scale; got ",
              weight.scalar_type());
  TORCH_CHECK(!weight_scale || (weight_scale->dim() == 1 && weight_scale->size(0) == weight.size(0)),
              "masked_logprob: weight_scale must be [", weight.size(0), "]");
  TORCH_CHECK(vocab_size >= 1 && vocab_size <= weight.size(0), "masked_logprob: vocab_size must be in 1..",
              weight.size(0), "; got ", vocab_size);
  TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) >= vocab_size), "masked_logprob: bias must be [",
              weight.size(0), "]; got ", bias->sizes());
  TORCH_CHECK(targets.dim() == 1 && targets.scalar_type() == at::kLong, "masked_logprob: targets must be [N] int64; got ",
              targets.sizes(), " ", targets.scalar_type());
  const int64_t count = rows ? rows->numel() : hidden.size(0);
  TORCH_CHECK(!rows || (rows->dim() == 1 && rows->scalar_type() == at::kLong), "masked_logprob: rows must be [N] int64");
  TORCH_CHECK(targets.size(0) == count, "masked_logprob: ", targets.size(0), " targets for ", count, " rows");
}

Outputs run(const at::Tensor& hidden_in, const at::Tensor& weight_in, const std::optional<at::Tensor>& bias_in,
            const at::Tensor& targets_in, const std::optional<at::Tensor>& rows_in, at::IntArrayRef excluded_ids,
            int64_t vocab_size, double logit_scale, std::optional<double> soft_cap,
            const std::optional<at::Tensor>& scales_in, bool statistics) {
  check(hidden_in, weight_in, bias_in, targets_in, rows_in, vocab_size, scales_in);
  const at::Tensor hidden = last_contiguous(hidden_in), weight = last_contiguous(weight_in);
  const at::Tensor targets = targets_in.contiguous();
  const at::Tensor bias = bias_in ? bias_in->to(at::kFloat).contiguous() : at::Tensor();
  const at::Tensor scales = scales_in ? scales_in->to(at::kFloat).contiguous() : at::Tensor();
  const at::Tensor rows = rows_in ? rows_in->contiguous() : at::arange(hidden.size(0), targets.options());

  Problem problem;
  problem.rows = targets.size(0);
  problem.depth = hidden.size(1);
  problem.vocabulary = vocab_size;
  problem.panels = (problem.rows + kLanes - 1) / kLanes;
  const int64_t share = (vocab_size + kMostSplits - 1) / kMostSplits;
  problem.split_rows = std::max(kLeastSplit, (share + kTileRows - 1) / kTileRows * kTileRows);
  problem.splits = (vocab_size + problem.split_rows - 1) / problem.split_rows;
  problem.transform = {static_cast<float>(logit_scale), static_cast<float>(soft_cap.value_or(0.0))};
  problem.excluded = excluded_ids.vec();
  problem.bias = bias.defined() ? bias.const_data_ptr<float>() : nullptr;
  problem.targets = targets.const_data_ptr<int64_t>();
  problem.statistics = statistics;
  for (int64_t row = 0; row < problem.rows; ++row) {
    TORCH_CHECK_INDEX(problem.targets[row] >= 0 && problem.targets[row] < vocab_size, "masked_logprob: targets[", row,
                      "] is ", problem.targets[row], ", outside the vocabulary of ", vocab_size);
    const int64_t source = rows.const_data_ptr<int64_t>()[row];
    TORCH_CHECK_INDEX(source >= 0 && source < hidden.size(0), "masked_logprob: rows[", row, "] is ", source,
                      ", outside the ", hidden.size(0), " hidden states");
  }

  const InnerKernels& inner = inner_kernels();
  const RowReader weight_rows(weight, scales.defined() ? scales.const_data_ptr<float>() : nullptr);
  const int64_t padded = problem.panels * kLanes;
  Scratch packed(padded * problem.depth), target(padded);
  Partial partial(problem.splits * padded, statistics);
  pack_hidden(inner, RowReader(hidden), rows.const_data_ptr<int64_t>(), problem, packed.get());
  std::fill_n(target.get(), padded, 0.0f);
  if (statistics) target_logits(inner, problem, weight_rows, packed.get(), target.get());
  walk_vocabulary(inner, problem, weight_rows, packed.get(), target.get(), partial);
  return merge(problem, partial, target.get(), hidden.options().dtype(at::kFloat));
}

std::tuple<at::Tensor, at::Tensor> masked_logprob(
    const at::Tensor& hidden, const at::Tensor& weight, const std::optional<at::Tensor>& bias, const at::Tensor& targets,
    const std::optional<at::Tensor>& rows, at::IntArrayRef excluded_ids, int64_t vocab_size, double logit_scale,
    std::optional<double> soft_cap, const std::optional<at::Tensor>& weight_scale) {
  Outputs out = run(hidden, weight, bias, targets, rows, excluded_ids, vocab_size, logit_scale, soft_cap, weight_scale,
                    false);
  return {out.log_prob, out.log_sum_exp};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> masked_logprob_statistics(
    const at::Tensor& hidden, const at::Tensor& weight, const std::optional<at::Tensor>& bias, const at::Tensor& targets,
    const std::optional<at::Tensor>& rows, at::IntArrayRef excluded_ids, int64_t vocab_size, double logit_scale,
    std::optional<double> soft_cap, const std::optional<at::Tensor>& weight_scale) {
  Outputs out = run(hidden, weight, bias, targets, rows, excluded_ids, vocab_size, logit_scale, soft_cap, weight_scale,
                    true);
  return {out.log_prob, out.log_sum_exp, out.entropy, out.rank};
}

}  // namespace

TORCH_LIBRARY_IMPL(diffscore_fast, CPU, m) {
  m.impl("masked_logprob", masked_logprob);
  m.impl("masked_logprob_statistics", masked_logprob_statistics);
}

}  // namespace diffscore
