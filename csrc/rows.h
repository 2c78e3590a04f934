// Loops along rows, for results that lie in rows of the caller's problem: the epilogue of products in blocks.
//
// Compiled once for each instruction set and chosen at run time. A row's numbers never mix with another row's, and the
// order of its sums depends on its width only.
#pragma once

#include <cstdint>

#include "inner.h"

namespace diffscore {

constexpr int64_t kRowVector = 16;  // float32 numbers in one vector: the width of AVX-512

// Numbers of bfloat16 are their 16 bits here, rounded to nearest, ties to even.
struct RowKernels {
  const char* name;

  // activation(c + bias) of each row's first `width` numbers, rounded to `out`, or in place where `out` is null. Rows of
  // c lie `stride` numbers apart. kSwiglu: silu(c + bias) * (up + up_bias), where `up` is laid out as c. c, up and the
  // biases are readable up to the next multiple of kRowVector; a null bias is 0.
  void (*activate)(float* c, const float* up, int64_t stride, int64_t rows, int64_t width, const float* bias,
                   const float* up_bias, Activation activation, uint16_t* out, int64_t out_stride);

  // Layer norm of c + residual, rounded to `out`. c is overwritten; c, gain and offset are readable up to the next
  // multiple of kRowVector.
  void (*normalise)(float* c, int64_t stride, int64_t rows, int64_t width, const uint16_t* residual,
                    int64_t residual_stride, const float* gain, const float* offset, float epsilon, uint16_t* out,
                    int64_t out_stride);
};

const RowKernels& portable_row_kernels();
const RowKernels* avx2_row_kernels();    // null where this build or processor has none
const RowKernels* avx512_row_kernels();  // likewise

// The fastest set this processor runs.
const RowKernels& row_kernels();

}  // namespace diffscore
