// Loops for products in blocks of bfloat16: their epilogue along rows, their packing, their softmax.
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

  // to[word * stride + i] = word `word` of rows[i], for kRowVector rows of `words` words of 4 bytes.
  void (*gather_words)(const char* const* rows, int64_t words, uint32_t* to, int64_t stride);

  // Pairs of rows of bfloat16 [rows, width], `row_bytes` apart, transposed: to[k * stride + r / 2] = the numbers k of row
  // r and, in the upper half, of row r + 1; beyond the last row 0.
  void (*transpose_pairs)(const char* from, int64_t row_bytes, int64_t rows, int64_t width, uint32_t* to,
                          int64_t stride);

  // `attend` of inner.h for the first `lanes` lanes (of whole vectors) of a block, with the weights as pairs of bfloat16
  // of neighbouring keys, rounded to nearest: pairs[r / 2][lane]. Scores stay as they are; rows of scores, accumulator
  // and pairs lie `stride` apart.
  void (*attend_in_pairs)(const float* scores, int64_t stride, int64_t keys, float scale, float first_key,
                          const float* limits, float* maximum, float* sum, float* accumulator, int64_t head_dim,
                          uint32_t* pairs, int64_t lanes);
};

const RowKernels& portable_row_kernels();
const RowKernels* avx2_row_kernels();    // null where this build or processor has none
const RowKernels* avx512_row_kernels();  // likewise

// The fastest set this processor runs.
const RowKernels& row_kernels();

}  // namespace diffscore
