// What the operations on int8 weights share: rows that are quantised, and a packed weight to multiply them with.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "convert.h"
#include "int8_kernels.h"
#include "parallel.h"

namespace diffscore {

// Rows of a unit of work: fewer where there are few, so that all threads get work. It changes no sum.
inline int64_t block_rows(int64_t rows) {
  const int64_t share = (rows + at::get_num_threads() - 1) / at::get_num_threads();
  return std::clamp<int64_t>((share + 5) / 6 * 6, 6, kBlockRows8);
}

inline void check_rows(const char* operation, const at::Tensor& x) {
  TORCH_CHECK(x.dim() == 2 && x.size(1) > 0 && x.scalar_type() == at::kFloat, operation,
              ": the rows must be [N, K] float32; got ", x.sizes(), " ", x.scalar_type());
  check_bounds(operation, "the input", x.size(0), x.size(1));
}

inline void check_packed(const char* operation, int64_t depth, const at::Tensor& packed, const at::Tensor& sums,
                         const at::Tensor& scale, int64_t groups) {
  TORCH_CHECK(scale.dim() == 1 && scale.scalar_type() == at::kFloat && scale.is_contiguous(), operation,
              ": scale must be [M] float32");
  const int64_t panels = groups * ((scale.size(0) / groups + kPanel - 1) / kPanel);
  const int64_t quads = (depth + kQuad - 1) / kQuad;
  TORCH_CHECK(packed.scalar_type() == at::kChar && packed.is_contiguous() &&
                  packed.sizes() == at::IntArrayRef({panels, quads, kPanel, kQuad}),
              operation, ": the weight is not packed for rows of ", depth, " numbers and ", scale.size(0),
              " columns; got ", packed.sizes());
  TORCH_CHECK(sums.scalar_type() == at::kInt && sums.is_contiguous() && sums.dim() == 1 &&
                  sums.size(0) == panels * kPanel,
              operation, ": the weight's sums must be [", panels * kPanel, "] int32");
}

// Up to `block` rows of float32 as codes, with the high parts of large numbers.
class QuantisedRows {
 public:
  QuantisedRows(int64_t block, int64_t depth)
      : depth_(depth), quads_((depth + kQuad - 1) / kQuad), codes_(block * quads_), high_(block * quads_), scale_(block) {
    listed_.reserve(quads_ * ((block + kGroup8 - 1) / kGroup8));
  }

  void read(const Int8Kernels& inner, const float* rows, int64_t row_stride, int64_t count) {
    count_ = count;
    for (int64_t r = 0; r < count; ++r)
      scale_.get()[r] = inner.quantise(rows + r * row_stride, depth_, stride(), codes_at(r), high_at(r));
    listed_.clear();
    ends_.assign(1, 0);
    const auto none = static_cast<uint32_t>(inner.shift) * 0x01010101u;
    std::vector<uint32_t> found(quads_);
    for (int64_t first = 0; first < count; first += kGroup8) {
      std::fill(found.begin(), found.end(), 0u);
      for (int64_t r = first; r < std::min(first + kGroup8, count); ++r) {
        const auto* words = reinterpret_cast<const uint32_t*>(high_at(r));
        for (int64_t q = 0; q < quads_; ++q) found[q] |= words[q] ^ none;
      }
      for (int64_t q = 0; q < quads_; ++q) {
        if (found[q]) listed_.push_back(static_cast<int32_t>(q));
      }
      ends_.push_back(static_cast<int64_t>(listed_.size()));
    }
  }

  // sums [count, kPanel] += the products of the high parts with a panel.
  void add_high(const Int8Kernels& inner, const int8_t* panel, int32_t* sums) const {
    for (int64_t first = 0, group = 0; first < count_; first += kGroup8, ++group) {
      const int64_t begin = ends_[group], quads = ends_[group + 1] - begin;
      if (quads > 0)
        inner.add_high(high_at(first), stride(), std::min(kGroup8, count_ - first), panel, listed_.data() + begin, quads,
                       sums + first * kPanel);
    }
  }

  int64_t count() const { return count_; }
  int64_t quads() const { return quads_; }
  int64_t stride() const { return quads_ * kQuad; }
  uint8_t* codes_at(int64_t row) const { return reinterpret_cast<uint8_t*>(codes_.get()) + row * stride(); }
  const float* scale() const { return scale_.get(); }

 private:
  uint8_t* high_at(int64_t row) const { return reinterpret_cast<uint8_t*>(high_.get()) + row * stride(); }

  int64_t depth_, quads_, count_ = 0;
  Scratch codes_, high_, scale_;
  std::vector<int32_t> listed_;  // quads with a high part, group after group
  std::vector<int64_t> ends_;    // where each group's quads begin and end
};

// A packed weight of one or two groups of rows, with its scale and bias by padded row.
class Int8Weight {
 public:
  int64_t panels;  // of a group

  Int8Weight(const Int8Kernels& inner, const at::Tensor& packed, const at::Tensor& sums, const at::Tensor& scale,
             const std::optional<at::Tensor>& bias, int64_t groups)
      : panels(packed.size(0) / groups),
        inner_(inner),
        packed_(packed.const_data_ptr<int8_t>()),
        quads_(packed.size(1)),
        start_(sums.numel()),
        scale_(sums.numel(), 0.0f),
        bias_(sums.numel(), 0.0f) {
    for (size_t i = 0; i < start_.size(); ++i) start_[i] = -inner.shift * sums.const_data_ptr<int32_t>()[i];
    const int64_t rows = scale.size(0) / groups;
    const at::Tensor offset = bias ? bias->contiguous() : at::Tensor();
    for (int64_t group = 0; group < groups; ++group) {
      std::copy_n(scale.const_data_ptr<float>() + group * rows, rows, scale_.data() + group * panels * kPanel);
      if (bias) std::copy_n(offset.const_data_ptr<float>() + group * rows, rows, bias_.data() + group * panels * kPanel);
    }
  }

  // tile [count, kPanel]: the rows' products with a panel, with their bias.
  void product(int64_t panel, const QuantisedRows& rows, int32_t* sums, float* tile) const {
    const int8_t* own = packed_ + panel * quads_ * kPanel * kQuad;
    for (int64_t q = 0; q < quads_; q += kDepthBlock8 / kQuad) {
      inner_.product(rows.codes_at(0) + q * kQuad, rows.stride(), rows.count(), own + q * kPanel * kQuad,
                     std::min(kDepthBlock8 / kQuad, quads_ - q), q == 0 ? start_.data() + panel * kPanel : nullptr, sums);
    }
    rows.add_high(inner_, own, sums);
    inner_.dequantise(sums, rows.count(), rows.scale(), scale_.data() + panel * kPanel, bias_.data() + panel * kPanel,
                      tile);
  }

  void product(int64_t panel, const QuantisedRows& rows, float* sums, float* tile) const {
    product(panel, rows, reinterpret_cast<int32_t*>(sums), tile);
  }

 private:
  const Int8Kernels& inner_;
  const int8_t* packed_;
  int64_t quads_;
  std::vector<int32_t> start_;
  std::vector<float> scale_, bias_;
};

}  // namespace diffscore
