// Rows of any stored dtype, converted to float32.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <cstring>

namespace diffscore {

// Bounds of what an operation takes, so that sizes in bytes, which are products of these, stay below 2^63. An expanded
// tensor can have any number of rows without the memory for them.
constexpr int64_t kMaxRows = (int64_t{1} << 31) - 1;
constexpr int64_t kMaxWidth = int64_t{1} << 24;

inline void check_bounds(const char* operation, const char* name, int64_t rows, int64_t width) {
  TORCH_CHECK(rows <= kMaxRows, operation, ": ", name, " has ", rows, " rows; at most ", kMaxRows, " are taken");
  TORCH_CHECK(width <= kMaxWidth, operation, ": a row of ", name, " has ", width, " numbers; at most ", kMaxWidth,
              " are taken");
}

template <class Stored>
void to_floats(const void* from, int64_t count, float* to, float scale = 1.0f) {
  for (int64_t k = 0; k < count; ++k) to[k] = static_cast<float>(static_cast<const Stored*>(from)[k]) * scale;
}

// `count` neighbouring numbers of float32, bfloat16 or float16.
inline void to_floats(at::ScalarType type, const void* from, int64_t count, float* to) {
  switch (type) {
    case at::kBFloat16: return to_floats<c10::BFloat16>(from, count, to);
    case at::kHalf: return to_floats<c10::Half>(from, count, to);
    default: std::memcpy(to, from, count * sizeof(float));
  }
}

// Rows of a matrix whose last dimension is contiguous, read as float32. Each row of int8 has a scale.
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
    if (type_ == at::kChar) return to_floats<int8_t>(bytes(row), width_, to, scales_[row]);
    to_floats(type_, bytes(row), width_, to);
  }

 private:
  const char* data_;
  at::ScalarType type_;
  int64_t size_, stride_, width_;
  const float* scales_;
};

inline at::Tensor last_contiguous(const at::Tensor& tensor) {
  return tensor.stride(-1) == 1 || tensor.size(-1) == 1 ? tensor : tensor.contiguous();
}

}  // namespace diffscore
