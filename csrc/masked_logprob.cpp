// Log-softmax of the vocabulary projection, gathered at the target; logits exist only as a tile that fits in cache.
//
// Hidden states are packed once into panels of 24 rows, the lanes. Tiles of 64 vocabulary rows are read in place and
// multiplied with a panel into a [64, 24] tile, or with a block of two panels into [64, 48]. The online softmax absorbs
// the tile while it is in cache. The vocabulary is cut into at most 64 splits, whose number depends on its size only;
// their states are merged in order.
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "brgemm.h"
#include "convert.h"
#include "inner.h"
#include "parallel.h"

namespace diffscore {
namespace {

constexpr int64_t kTileRows = kBlockRows;  // vocabulary rows in one tile
constexpr int64_t kMaxSplits = 64;
constexpr int64_t kMinSplit = 256;    // vocabulary rows; smaller splits would cost more to merge than they save
constexpr int64_t kPanelChunk = 42;   // panels that one unit of work takes through a split; an even number
constexpr int64_t kWideDepth = 1024;  // beyond it, a tile of the weight does not stay in the second-level cache
constexpr int64_t kWidePanels = 14;   // panels that then meet a piece of the tile together
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Problem {
  int64_t rows, depth, vocabulary, panels, splits, split_rows;
  Products products;
  LogitTransform transform;
  std::vector<int64_t> excluded;
  const float* bias;      // [V] or null
  const int64_t* targets; // [N]
  bool statistics;

  // 0 in a panel that only fills the last block
  int64_t lanes_in(int64_t panel) const { return std::clamp<int64_t>(rows - panel * kLanes, 0, kLanes); }
  // Panels whose products lie in one tile.
  int64_t side_by_side() const { return products.in_blocks() ? kBlockPanels : 1; }
  int64_t tile_stride() const { return side_by_side() * kLanes; }
  int64_t number_size() const { return products.number_size(); }
  int64_t weight_tile_bytes() const { return kTileRows * depth * number_size(); }
  // Where `tiles` has the products of its panel `index`.
  float* tile_of(float* tiles, int64_t index) const {
    const int64_t side = side_by_side();
    return tiles + index / side * kTileRows * tile_stride() + index % side * kLanes;
  }
};

// The state of each split's softmax: [splits, panels * kLanes] each.
struct Partial {
  Scratch maximum, sum, weighted, above;
  explicit Partial(int64_t size, bool statistics)
      : maximum(size), sum(size), weighted(statistics ? size : 0), above(statistics ? size : 0) {}
};

void pack_panels(const InnerKernels& inner, const RowReader& hidden, const int64_t* rows, const Problem& problem,
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
      inner.gather(from, problem.depth, 1.0f, packed + panel * problem.depth * kLanes, kLanes, kLanes / kVector);
    }
  });
}

void pack_blocks(const RowReader& hidden, const int64_t* rows, const Problem& problem, char* packed) {
  const int64_t row_bytes = problem.depth * problem.number_size();
  share_units(problem.panels / kBlockPanels, [&](const auto& claim) {
    const std::vector<char> zeros(row_bytes, 0);
    const char* from[kBlockLanes];
    for (int64_t block; claim(block);) {
      for (int64_t lane = 0; lane < kBlockLanes; ++lane) {
        const int64_t row = block * kBlockLanes + lane;
        from[lane] = row < problem.rows ? hidden.bytes(rows[row]) : zeros.data();
      }
      pack_block(from, row_bytes / kWord, packed + block * kBlockLanes * row_bytes);
    }
  });
}

// A tile of the weight: `rows` rows, the first at `data`, `stride` numbers apart.
struct WeightTile {
  const char* data;
  int64_t stride, rows;
};

void read_row(const Problem& problem, const RowReader& weight, int64_t row, char* to) {
  if (problem.products.in_blocks()) {
    std::memcpy(to, weight.bytes(row), problem.depth * problem.number_size());
  } else {
    weight.read(row, reinterpret_cast<float*>(to));
  }
}

// Vocabulary rows first .. first + rows: in place if they can be multiplied there, else copied to `scratch`
// [weight_tile_bytes]. Panels need a copy in float32, blocks a copy of the vocabulary's last tile, padded with zeros.
WeightTile weight_tile(const Problem& problem, const RowReader& weight, int64_t first, int64_t rows, char* scratch) {
  const bool fit = problem.products.in_blocks() ? rows == kTileRows : weight.is_float();
  if (fit) return {weight.bytes(first), weight.stride(), rows};
  const int64_t row_bytes = problem.depth * problem.number_size();
  for (int64_t r = 0; r < rows; ++r) read_row(problem, weight, first + r, scratch + r * row_bytes);
  if (problem.products.in_blocks()) std::memset(scratch + rows * row_bytes, 0, (kTileRows - rows) * row_bytes);
  return {scratch, problem.depth, rows};
}

// Products of a tile of the weight with each of `count` panels. The loop over depth is the outer one: for a wide model
// a [64, 384] piece of the weight then stays in the second-level cache for all panels. A product's sums do not depend
// on `count`.
void tile_products(const InnerKernels& inner, const Problem& problem, const WeightTile& weight, const char* packed,
                   int64_t first_panel, int64_t count, float* tiles) {
  const int64_t size = problem.number_size(), side = problem.side_by_side();
  for (int64_t k = 0; k < problem.depth; k += kDepthBlock) {
    const int64_t depth = std::min(kDepthBlock, problem.depth - k);
    const char* from = weight.data + k * size;
    for (int64_t p = 0; p < count; p += side) {
      const char* states = packed + ((first_panel + p) * problem.depth + side * k) * kLanes * size;
      float* to = problem.tile_of(tiles, p);
      if (problem.products.in_blocks()) {
        block_product(problem.products, from, weight.stride, kTileRows, depth, states, to, k > 0);
      } else {
        inner.product(reinterpret_cast<const float*>(from), weight.stride, 1, weight.rows, depth,
                      reinterpret_cast<const float*>(states), to, k > 0,
                      vectors_for(problem.lanes_in(first_panel + p)));
      }
    }
  }
}

// Turns the products of vocabulary rows first .. first + rows with one panel into logits, in place.
void finish_logits(const InnerKernels& inner, const Problem& problem, int64_t first, int64_t rows, int vectors,
                   float* tile) {
  const int64_t stride = problem.tile_stride();
  inner.logits(tile, stride, rows, problem.bias ? problem.bias + first : nullptr, problem.transform, vectors);
  for (const int64_t id : problem.excluded) {
    if (id >= first && id < first + rows) std::fill_n(tile + (id - first) * stride, kLanes, -kInfinity);
  }
}

// The targets' logits, for the pass that ranks them: the diagonal of a tile of the lanes' own target rows. The tile has
// the shape of that pass's tiles, so that a target's logit has the same bits in both.
void target_logits(const InnerKernels& inner, const Problem& problem, const RowReader& weight, const char* packed,
                   float* target) {
  const int64_t side = problem.side_by_side();
  share_units(problem.panels / side, [&](const auto& claim) {
    const ProductScope scope(problem.products);
    Scratch tile(kTileRows * problem.tile_stride());
    std::vector<char> rows(problem.weight_tile_bytes(), 0);
    for (int64_t unit; claim(unit);) {
      const int64_t first = unit * side * kLanes, count = std::min(side * kLanes, problem.rows - first);
      const int64_t* ids = problem.targets + first;
      for (int64_t lane = 0; lane < count; ++lane)
        read_row(problem, weight, ids[lane], rows.data() + lane * problem.depth * problem.number_size());
      tile_products(inner, problem, {rows.data(), problem.depth, count}, packed, unit * side, side, tile.get());
      for (int64_t lane = 0; lane < count; ++lane) {
        float* row = tile.get() + lane * problem.tile_stride();
        finish_logits(inner, problem, ids[lane], 1, kLanes / kVector, row + lane / kLanes * kLanes);
        target[first + lane] = row[lane];
      }
    }
  });
}

void walk_vocabulary(const InnerKernels& inner, const Problem& problem, const RowReader& weight, const char* packed,
                     float* target, Partial& partial) {
  const int64_t chunk = problem.splits < 16 ? 4 : kPanelChunk;
  const int64_t groups = (problem.panels + chunk - 1) / chunk;
  const int64_t padded = problem.panels * kLanes;
  share_units(problem.splits * groups, [&](const auto& claim) {
    const ProductScope scope(problem.products);
    const int64_t together = problem.depth > kWideDepth ? kWidePanels : problem.side_by_side();
    Scratch tiles(together * kTileRows * kLanes);
    std::vector<char> scratch(problem.products.in_blocks() || !weight.is_float() ? problem.weight_tile_bytes() : 0);
    for (int64_t unit; claim(unit);) {
      const int64_t split = unit / groups, first_panel = unit % groups * chunk;
      const int64_t last_panel = std::min(first_panel + chunk, problem.panels);
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
        const WeightTile from = weight_tile(problem, weight, first, rows, scratch.data());
        for (int64_t group = first_panel; group < last_panel; group += together) {
          const int64_t count = std::min(together, last_panel - group);
          tile_products(inner, problem, from, packed, group, count, tiles.get());
          for (int64_t panel = group; panel < group + count; ++panel) {
            const int64_t lanes = problem.lanes_in(panel), at = panel * kLanes, stride = problem.tile_stride();
            const int vectors = vectors_for(lanes);
            float* tile = problem.tile_of(tiles.get(), panel - group);
            finish_logits(inner, problem, first, rows, vectors, tile);
            // With statistics the targets' logits are known already, and other threads read them.
            for (int64_t lane = 0; lane < lanes && !problem.statistics; ++lane) {
              const int64_t place = problem.targets[at + lane] - first;
              if (place >= 0 && place < rows) target[at + lane] = tile[place * stride + lane];
            }
            inner.absorb(tile, stride, rows,
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

// Merges the splits in their order, in float64: log p = (z_target - m) - log sum, so that a common offset costs no
// digits. A logit of +inf takes all the mass, as in the limit of large logits. A split's sum is NaN if it met a NaN.
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
    const bool infinite = maximum == kInfinity && !undefined;
    double sum = 0.0, weighted = 0.0, above = 0.0;
    for (int64_t split = 0; split < problem.splits; ++split) {
      const int64_t at = split * padded + row;
      if (problem.statistics) above += partial.above.get()[at];  // a count, valid whatever the sums are
      const double moved = double(partial.maximum.get()[at]) - maximum;
      if (!(moved > -kInfinity)) continue;  // the split saw only -inf; or the maximum is +inf, and the entropy undefined
      const double factor = std::exp(moved);
      sum += partial.sum.get()[at] * factor;
      if (problem.statistics) {
        weighted += (partial.weighted.get()[at] + moved * partial.sum.get()[at]) * factor;
      }
    }
    const double log_sum = undefined ? std::numeric_limits<double>::quiet_NaN() : infinite ? 0.0 : std::log(sum);
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
  check_bounds("masked_logprob", "targets", targets.numel(), hidden.size(1));
  check_bounds("masked_logprob", "the projection", vocab_size, weight.size(1));
  TORCH_CHECK(weight_scale ? weight.scalar_type() == at::kChar : real(weight),
              "masked_logprob: weight must be float32, bfloat16 or float16, or int8 with weight_scale; got ",
              weight.scalar_type());
  TORCH_CHECK(!weight_scale || (weight_scale->dim() == 1 && weight_scale->size(0) == weight.size(0)),
              "masked_logprob: weight_scale must be [", weight.size(0), "]");
  TORCH_CHECK(vocab_size >= 1 && vocab_size <= weight.size(0), "masked_logprob: vocab_size must be in 1..",
              weight.size(0), "; got ", vocab_size);
  TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) >= vocab_size), "masked_logprob: bias must be [",
              weight.size(0), "]; got ", bias->sizes());
  for (const auto& [name, vector] : {std::pair{"bias", &bias}, std::pair{"weight_scale", &weight_scale}})
    TORCH_CHECK(!*vector || !(*vector)->is_complex(), "masked_logprob: ", name, " must be of real numbers; got ",
                (*vector)->scalar_type());
  TORCH_CHECK(targets.dim() == 1 && targets.scalar_type() == at::kLong, "masked_logprob: targets must be [N] int64; got ",
              targets.sizes(), " ", targets.scalar_type());
  const int64_t count = rows ? rows->numel() : hidden.size(0);
  TORCH_CHECK(!rows || (rows->dim() == 1 && rows->scalar_type() == at::kLong), "masked_logprob: rows must be [N] int64");
  TORCH_CHECK(targets.size(0) == count, "masked_logprob: ", targets.size(0), " targets for ", count, " rows");
}

// Empty where the inputs can be multiplied in blocks, else why not.
std::string blocks_unfit(const at::Tensor& hidden, const at::Tensor& weight) {
  const at::ScalarType type = hidden.scalar_type();
  if (type != weight.scalar_type() || (type != at::kFloat && type != at::kBFloat16))
    return "hidden states and weight are not both float32 or both bfloat16";
  // oneDNN counts a tile's bytes in 32 bits.
  constexpr int64_t max_bytes = int64_t{1} << 31;
  if (weight.stride(0) >= max_bytes / (kTileRows * weight.element_size()))
    return std::to_string(kTileRows) + " rows of the weight span 2 GiB or more";
  if (hidden.size(1) % kDepthStep != 0) return "the width is no multiple of " + std::to_string(kDepthStep);
  return "";
}

Outputs run(const at::Tensor& hidden_in, const at::Tensor& weight_in, const std::optional<at::Tensor>& bias_in,
            const at::Tensor& targets_in, const std::optional<at::Tensor>& rows_in, at::IntArrayRef excluded_ids,
            int64_t vocab_size, double logit_scale, std::optional<double> soft_cap,
            const std::optional<at::Tensor>& scales_in, std::string_view products, bool statistics) {
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
  problem.products = choose_products("masked_logprob", products, hidden.scalar_type(), blocks_unfit(hidden, weight));
  problem.panels = (problem.rows + problem.tile_stride() - 1) / problem.tile_stride() * problem.side_by_side();
  const int64_t share = (vocab_size + kMaxSplits - 1) / kMaxSplits;
  problem.split_rows = std::max(kMinSplit, (share + kTileRows - 1) / kTileRows * kTileRows);
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
  Scratch packed(padded * problem.depth * problem.number_size() / kWord), target(padded);
  char* states = reinterpret_cast<char*>(packed.get());
  Partial partial(problem.splits * padded, statistics);
  const RowReader hidden_rows(hidden);
  if (problem.products.in_blocks()) {
    pack_blocks(hidden_rows, rows.const_data_ptr<int64_t>(), problem, states);
  } else {
    pack_panels(inner, hidden_rows, rows.const_data_ptr<int64_t>(), problem, packed.get());
  }
  std::fill_n(target.get(), padded, 0.0f);
  if (statistics) target_logits(inner, problem, weight_rows, states, target.get());
  walk_vocabulary(inner, problem, weight_rows, states, target.get(), partial);
  return merge(problem, partial, target.get(), hidden.options().dtype(at::kFloat));
}

std::tuple<at::Tensor, at::Tensor> masked_logprob(
    const at::Tensor& hidden, const at::Tensor& weight, const std::optional<at::Tensor>& bias, const at::Tensor& targets,
    const std::optional<at::Tensor>& rows, at::IntArrayRef excluded_ids, int64_t vocab_size, double logit_scale,
    std::optional<double> soft_cap, const std::optional<at::Tensor>& weight_scale, std::string_view products) {
  Outputs out = run(hidden, weight, bias, targets, rows, excluded_ids, vocab_size, logit_scale, soft_cap, weight_scale,
                    products, false);
  return {out.log_prob, out.log_sum_exp};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> masked_logprob_statistics(
    const at::Tensor& hidden, const at::Tensor& weight, const std::optional<at::Tensor>& bias, const at::Tensor& targets,
    const std::optional<at::Tensor>& rows, at::IntArrayRef excluded_ids, int64_t vocab_size, double logit_scale,
    std::optional<double> soft_cap, const std::optional<at::Tensor>& weight_scale, std::string_view products) {
  Outputs out = run(hidden, weight, bias, targets, rows, excluded_ids, vocab_size, logit_scale, soft_cap, weight_scale,
                    products, true);
  return {out.log_prob, out.log_sum_exp, out.entropy, out.rank};
}

}  // namespace

TORCH_LIBRARY_IMPL(diffscore_fast, CPU, m) {
  m.impl("masked_logprob", masked_logprob);
  m.impl("masked_logprob_statistics", masked_logprob_statistics);
}

}  // namespace diffscore
