// Rows of any stored type to float32.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>

namespace diffscore {

// Rows of a matrix whose last dimension is contiguous, read as float32. Rows of int8 carry a scale each.
class RowReader {
 public:
  RowReader(const at::Tensor& matrix, const float* scales = nullptr)
      : data_(static_cast<const char*>(matrix.const_data_ptr())),
        type_(matrix.scalar_type()),
        size_(matrix.element_size()),
        stride_(matrix.stride(0)),
        width_(matrix.size(1)),
        scales_(scales) {}

  bool is_float() const { return type_ == at::kFloat; }
  int64_t stride() const { return stride_; }
  const char* bytes(int64_t row) const { return data_ + row * stride_ * size_; }
  const float* floats(int64_t row) const { return reinterpret_cast<const float*>(data_) + row * stride_; }

  void read(int64_t row, float* to) const {
    const char* from = bytes(row);
    switch (type_) {
      case at::kBFloat16: return copy(reinterpret_cast<const c10::BFloat16*>(from), to, 1.0f);
      case at::kHalf: return copy(reinterpret_cast<const c10::Half*>(from), to, 1.0f);
      case at::kChar: return copy(reinterpret_cast<const int8_t*>(from), to, scales_[row]);
      default: return copy(reinterpret_cast<const float*>(from), to, 1.0f);
    }
  }

 private:
  template <class Stored>
  void copy(const Stored* from, float* to, float scale) const {
    for (int64_t k = 0; k < width_; ++k) to[k] = static_cast<float>(from[k]) * scale;
  }

  const char* data_;
  at::ScalarType type_;
  int64_t size_, stride_, width_;
  const float* scales_;
};

inline at::Tensor last_contiguous(const at::Tensor& tensor) {
  return tensor.stride(-1) == 1 || tensor.size(-1) == 1 ? tensor : tensor.contiguous();
}

}  // namespace diffscore
