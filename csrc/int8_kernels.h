// Inner loops for products of int8, compiled once for each instruction set and chosen at run time.
//
// Weights are signed codes with one scale per row, packed into panels of 64 rows. Activations are quantised row by row,
// with a step that follows from the row's root mean square: the few numbers that are far larger have a high part beside
// their code. High parts are multiplied only where a group of rows has some.
// Sums of products are exact int32 numbers. All float operations are the same in every set, one by one, and none is
// fused (see int8_loops.inc). Therefore all sets give the same bits, whatever else is in the batch.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace diffscore {

constexpr int64_t kPanel = 64;      // weight rows, which are columns of the result, in one panel
constexpr int64_t kQuad = 4;        // neighbouring depths that one instruction multiplies and adds
constexpr int64_t kBlockRows8 = 96;  // rows that share a walk over the weight: their products stay in cache
constexpr int64_t kWideBlockRows8 = 48;  // likewise, where the wide rows between two layers stay in cache, too
constexpr int64_t kDepthBlock8 = 512;  // a [64, 512] piece of a panel stays in the first-level cache
constexpr int64_t kGroup8 = 6;  // rows that share a list of the quads in which one of them has a high part
constexpr int32_t kHigh = 255;  // a number is code + 255 high, with codes from -127 to 127
constexpr double kReach = 3.0;  // root mean squares of a row that its codes reach without a high part
constexpr int64_t kMaxDepth8 = 1 << 17;  // 128 * 127 * depth stays below 2^31
constexpr int64_t kSoftmaxLanes = 16;

struct Int8Kernels {
  const char* name;

  // What is added to the activations' codes, so that an instruction that multiplies unsigned by signed numbers can take
  // them: 128 or 0. A sum of products starts at -shift * (sum of the weight row's codes), which cancels it.
  int32_t shift;

  // round(x * 127 / reach), ties to even, as codes + kHigh * high, [padded] each with `shift` added to both; those beyond
  // `width` are 0. The reach is min(max|x|, kReach * root mean square), the latter of x as multiples of max|x| / 2^14,
  // so that the sum of squares is exact. Returns reach / 127. A row whose numbers are all below 2^-100 counts as zeros,
  // with scale 0; one with a NaN or an infinity has the scale NaN.
  float (*quantise)(const float* x, int64_t width, int64_t padded, uint8_t* codes, uint8_t* high);

  // sums[r][c] (+)= sum_k x[r][k] w[c][k] for kPanel columns and 4 * quads depths; x rows `stride` apart, w as
  // [quads][kPanel][kQuad]. `start` [kPanel] is where sums begin; null adds to them.
  void (*product)(const uint8_t* x, int64_t stride, int64_t rows, const int8_t* w, int64_t quads,
                  const int32_t* start, int32_t* sums);

  // sums[r][c] += kHigh * sum_k high[r][k] w[c][k] for up to kGroup8 rows, over the `count` quads that are listed.
  void (*add_high)(const uint8_t* high, int64_t stride, int64_t rows, const int8_t* w, const int32_t* quads,
                   int64_t count, int32_t* sums);

  // y[r][c] = sums[r][c] * (row_scale[r] * scale[c]) + bias[c], [rows, kPanel].
  void (*dequantise)(const int32_t* sums, int64_t rows, const float* row_scale, const float* scale, const float* bias,
                     float* y);

  // In place, `count` numbers (a multiple of kPanel): GELU; silu(y) * up.
  void (*gelu)(float* y, int64_t count);
  void (*gate)(float* y, const float* up, int64_t count);

  // Layer norm of y + residual, [width], in place.
  void (*normalise)(float* y, const float* residual, const float* gain, const float* offset, int64_t width,
                    float epsilon);

  // Takes scale * z [rows, kPanel] into a running softmax of kSoftmaxLanes lanes per row: column c belongs to lane
  // c % kSoftmaxLanes. `sum` is of exp(z - maximum).
  void (*absorb)(const float* z, int64_t rows, float scale, float* maximum, float* sum);

  // sum_k a[k] b[k] in float32, added in an order that depends on the width alone.
  float (*dot)(const float* a, const float* b, int64_t width);
};

const Int8Kernels& int8_portable();
const Int8Kernels* int8_avx2();         // null where this build or processor has none
const Int8Kernels* int8_avx512_vnni();  // likewise

// The sets that run on this processor, the fastest first.
const std::vector<const Int8Kernels*>& int8_kernels();

// The set of that name, or the fastest for "auto". Raises if it cannot run here.
const Int8Kernels& int8_kernels_named(std::string_view name);

}  // namespace diffscore
