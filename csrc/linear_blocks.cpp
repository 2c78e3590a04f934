// The body's matmuls in bfloat16 with their epilogue in cache, by products in blocks.
//
// The weight is packed once, 48 of its rows to a block, as bfloat16 instructions read it. Tiles of 48 rows of x, up to
// four of them together, are multiplied with one block after the other, so that tiles after the first find the block in
// the second-level cache. A tile's products stay in float32 until the epilogue rounds the result once. The last tile is
// padded: one generated kernel then makes all sums of a depth, and a row's bits do not depend on the others.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string_view>
#include <vector>

#include "brgemm.h"
#include "convert.h"
#include "parallel.h"
#include "rows.h"

namespace diffscore {
namespace {

constexpr int64_t kTileRows = 48;     // three AMX tiles
constexpr int64_t kMaxTiles = 4;      // tiles of one unit of work
constexpr int64_t kUnitDepth = 4096;  // numbers of a row that are multiplied at once: a block of the weight stays in cache
constexpr int64_t kPair = 2;          // bfloat16 numbers in a word
constexpr int64_t kNumber = 2;        // bytes

constexpr int64_t steps(int64_t count, int64_t step) {
  return (count + step - 1) / step;
}

struct Problem {
  const char* x;
  int64_t rows, x_depth, x_stride;  // numbers
  const char* weight;               // [groups * blocks, depth / 2, kBlockLanes, 2]
  int64_t depth, groups, blocks;    // a gated product has two groups of blocks
  int64_t kept;                     // columns of the result
  const float *bias, *gain, *offset;  // [groups * padded()], [padded()]
  const uint16_t* residual;           // null: no norm
  int64_t residual_stride;
  Activation activation;
  float epsilon;
  uint16_t* out;  // [rows, kept]

  int64_t padded() const { return blocks * kBlockLanes; }
  const char* block(int64_t group, int64_t index) const {
    return weight + (group * blocks + index) * kBlockLanes * depth * kNumber;
  }
};

// Where a tile's rows of x can be read.
struct Tile {
  const char* data;
  int64_t stride;
};

// Products of a tile with a block, to c, whose rows lie `stride` numbers apart.
void multiply(Products products, const Tile& tile, const char* block, int64_t depth, float* c, int64_t stride) {
  for (int64_t k = 0; k < depth; k += kUnitDepth)
    block_product(products, tile.data + k * kNumber, tile.stride, kTileRows, std::min(kUnitDepth, depth - k),
                  block + k * kBlockLanes * kNumber, c, k > 0, stride);
}

void run(const RowKernels& kernels, Products products, const Problem& problem) {
  // oneDNN counts a tile's bytes in 32 bits.
  constexpr int64_t max_stride = (int64_t{1} << 31) / (kTileRows * kNumber);
  const bool in_place = problem.depth == problem.x_depth && problem.x_stride < max_stride;
  const int64_t tiles = steps(problem.rows, kTileRows);
  // Fewer tiles together where there are few, so that all threads get work; it changes no sum.
  const int64_t together = std::clamp<int64_t>(tiles / (2 * at::get_num_threads()), 1, kMaxTiles);
  const bool normed = problem.residual != nullptr;
  const int64_t width = problem.padded(), stride = problem.groups * (normed ? width : kBlockLanes);
  share_units(steps(tiles, together), [&](const auto& claim) {
    const ProductScope scope(products);
    Scratch sums((normed ? together : 1) * kTileRows * stride);
    std::vector<char> copies(together * kTileRows * problem.depth * kNumber);
    Tile from[kMaxTiles];
    for (int64_t unit; claim(unit);) {
      const int64_t first = unit * together, here = std::min(together, tiles - first);
      const auto rows_in = [&](int64_t t) { return std::min(kTileRows, problem.rows - (first + t) * kTileRows); };
      for (int64_t t = 0; t < here; ++t) {
        const char* rows = problem.x + (first + t) * kTileRows * problem.x_stride * kNumber;
        from[t] = {rows, problem.x_stride};
        if (in_place && rows_in(t) == kTileRows) continue;
        char* copy = copies.data() + t * kTileRows * problem.depth * kNumber;
        std::memset(copy, 0, kTileRows * problem.depth * kNumber);
        for (int64_t r = 0; r < rows_in(t); ++r)
          std::memcpy(copy + r * problem.depth * kNumber, rows + r * problem.x_stride * kNumber,
                      problem.x_depth * kNumber);
        from[t] = {copy, problem.depth};
      }
      for (int64_t block = 0; block < problem.blocks; ++block) {
        const int64_t column = block * kBlockLanes;
        for (int64_t t = 0; t < here; ++t) {
          float* c = normed ? sums.get() + t * kTileRows * stride + column : sums.get();
          float* up = problem.groups > 1 ? c + (normed ? width : kBlockLanes) : nullptr;
          multiply(products, from[t], problem.block(0, block), problem.depth, c, stride);
          if (problem.groups > 1) multiply(products, from[t], problem.block(1, block), problem.depth, up, stride);
          // Before a norm the activated numbers stay in float32, in place.
          uint16_t* to = normed ? nullptr : problem.out + (first + t) * kTileRows * problem.kept + column;
          kernels.activate(c, up, stride, rows_in(t), std::min(kBlockLanes, problem.kept - column),
                           problem.bias ? problem.bias + column : nullptr,
                           problem.bias && problem.groups > 1 ? problem.bias + width + column : nullptr,
                           problem.activation, to, problem.kept);
        }
      }
      for (int64_t t = 0; normed && t < here; ++t) {
        const int64_t row = (first + t) * kTileRows;
        kernels.normalise(sums.get() + t * kTileRows * stride, stride, rows_in(t), problem.kept,
                          problem.residual + row * problem.residual_stride, problem.residual_stride, problem.gain,
                          problem.offset, problem.epsilon, problem.out + row * problem.kept, problem.kept);
      }
    }
  });
}

// `groups` runs of `each` numbers as float32, every run padded with zeros to `padded` numbers.
std::vector<float> padded_floats(const std::optional<at::Tensor>& vector, int64_t groups, int64_t each, int64_t padded,
                                 const char* name) {
  if (!vector) return {};
  TORCH_CHECK(vector->dim() == 1 && vector->size(0) == groups * each && vector->scalar_type() == at::kBFloat16,
              "linear: ", name, " must be [", groups * each, "] bfloat16");
  const at::Tensor flat = vector->contiguous();
  std::vector<float> out(groups * padded, 0.0f);
  for (int64_t group = 0; group < groups; ++group)
    to_floats<c10::BFloat16>(flat.const_data_ptr<c10::BFloat16>() + group * each, each, out.data() + group * padded);
  return out;
}

const uint16_t* bits(const at::Tensor& tensor) {
  return static_cast<const uint16_t*>(tensor.const_data_ptr());
}

at::Tensor pack_weight(const at::Tensor& weight_in, bool gated) {
  TORCH_CHECK(weight_in.dim() == 2 && weight_in.size(1) > 0 && weight_in.scalar_type() == at::kBFloat16,
              "linear: a weight to pack must be [M, K] bfloat16; got ", weight_in.sizes(), " ",
              weight_in.scalar_type());
  check_bounds("linear", "the weight", weight_in.size(0), weight_in.size(1));
  const int64_t groups = gated ? 2 : 1;
  TORCH_CHECK(weight_in.size(0) % groups == 0, "linear: swiglu needs an even number of weight rows");
  const at::Tensor weight = last_contiguous(weight_in);
  const int64_t each = weight.size(0) / groups, blocks = steps(each, kBlockLanes);
  const int64_t depth = steps(weight.size(1), kDepthStep) * kDepthStep;
  at::Tensor packed = at::empty({groups * blocks, depth / kPair, kBlockLanes, kPair}, weight.options());
  char* to = static_cast<char*>(packed.mutable_data_ptr());
  const RowReader rows(weight);
  share_units(groups * blocks, [&](const auto& claim) {
    std::vector<char> copies(kBlockLanes * depth * kNumber);
    const char* from[kBlockLanes];
    for (int64_t lane = 0; lane < kBlockLanes; ++lane) from[lane] = copies.data() + lane * depth * kNumber;
    for (int64_t block; claim(block);) {
      const int64_t first = block % blocks * kBlockLanes, count = std::min(kBlockLanes, each - first);
      std::memset(copies.data(), 0, copies.size());
      for (int64_t lane = 0; lane < count; ++lane)
        std::memcpy(copies.data() + lane * depth * kNumber, rows.bytes(block / blocks * each + first + lane),
                    weight.size(1) * kNumber);
      pack_block(from, depth / kPair, to + block * kBlockLanes * depth * kNumber);
    }
  });
  return packed;
}

at::Tensor linear_packed(const at::Tensor& x_in, const at::Tensor& packed, int64_t width,
                         const std::optional<at::Tensor>& bias_in, std::string_view activation,
                         const std::optional<at::Tensor>& residual_in, const std::optional<at::Tensor>& gain_in,
                         const std::optional<at::Tensor>& offset_in, double epsilon, std::string_view products_asked) {
  TORCH_CHECK(x_in.dim() == 2 && x_in.size(1) > 0 && x_in.scalar_type() == at::kBFloat16,
              "linear: x must be [N, K] bfloat16; got ", x_in.sizes(), " ", x_in.scalar_type());
  TORCH_CHECK(activation == "none" || activation == "gelu" || activation == "swiglu", "linear: activation must be "
              "none, gelu or swiglu; got ", activation);
  TORCH_CHECK(products_asked == "brgemm" || products_asked == "plain",
              "linear: products of a packed weight must be brgemm or plain; got ", products_asked);
  check_bounds("linear", "x", x_in.size(0), x_in.size(1));
  const int64_t groups = activation == "swiglu" ? 2 : 1, kept = width / groups, blocks = steps(kept, kBlockLanes);
  const int64_t depth = steps(x_in.size(1), kDepthStep) * kDepthStep;
  TORCH_CHECK(width >= 0 && width % groups == 0, "linear: swiglu needs an even number of weight rows; got ", width);
  TORCH_CHECK(packed.dim() == 4 && packed.is_contiguous() && packed.scalar_type() == at::kBFloat16 &&
                  packed.size(0) == groups * blocks && packed.size(1) == depth / kPair &&
                  packed.size(2) == kBlockLanes && packed.size(3) == kPair,
              "linear: the packed weight must be [", groups * blocks, ", ", depth / kPair, ", ", kBlockLanes,
              ", 2] bfloat16; got ", packed.sizes());
  TORCH_CHECK(residual_in.has_value() == gain_in.has_value() && gain_in.has_value() == offset_in.has_value(),
              "linear: residual, gain and offset come together");
  TORCH_CHECK(!residual_in || (residual_in->dim() == 2 && residual_in->size(0) == x_in.size(0) &&
                               residual_in->size(1) == kept && residual_in->scalar_type() == at::kBFloat16),
              "linear: residual must be [", x_in.size(0), ", ", kept, "] bfloat16");
  const Products products = choose_products("linear", products_asked, at::kBFloat16, "");
  const int64_t padded = blocks * kBlockLanes;
  const std::vector<float> bias = padded_floats(bias_in, groups, kept, padded, "bias");
  const std::vector<float> gain = padded_floats(gain_in, 1, kept, padded, "gain");
  const std::vector<float> offset = padded_floats(offset_in, 1, kept, padded, "offset");
  const at::Tensor x = last_contiguous(x_in);
  const at::Tensor residual = residual_in ? last_contiguous(*residual_in) : at::Tensor();
  at::Tensor out = at::empty({x.size(0), kept}, x.options());
  const auto given = [](const std::vector<float>& numbers) { return numbers.empty() ? nullptr : numbers.data(); };
  run(row_kernels(), products,
      {static_cast<const char*>(x.const_data_ptr()), x.size(0), x.size(1), x.stride(0),
       static_cast<const char*>(packed.const_data_ptr()), depth, groups, blocks, kept, given(bias), given(gain),
       given(offset), residual.defined() ? bits(residual) : nullptr, residual.defined() ? residual.stride(0) : 0,
       groups > 1 ? Activation::kSwiglu : activation == "gelu" ? Activation::kGelu : Activation::kNone,
       static_cast<float>(epsilon), static_cast<uint16_t*>(out.mutable_data_ptr())});
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(diffscore_fast, CPU, m) {
  m.impl("pack_weight", pack_weight);
  m.impl("linear_packed", linear_packed);
}

}  // namespace diffscore
