// Inner loops, compiled once for each instruction set and chosen at run time.
//
// All of them work on panels of kLanes columns. A lane is one row of the caller's problem (a hidden state, a query).
// The sums of a lane never mix with another lane's, and their order depends on shapes only. Therefore every result is
// independent, bit for bit, of the other rows in the batch.
#pragma once

#include <cstdint>

#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 12
#error "The C++ kernels need GCC 12 or newer, or clang: the inner loops use __builtin_shufflevector."
#endif

namespace diffscore {

constexpr int64_t kVector = 8;             // float32 numbers in one vector
constexpr int64_t kLanes = 3 * kVector;    // 4 x 24 accumulators fill the 16 registers of AVX2 and hide the latency
constexpr int64_t kDepthBlock = 384;       // a [384, 24] panel stays near the first-level cache

// What the online softmax over the vocabulary keeps for each of a panel's lanes.
struct LogitState {
  float* maximum;        // [kLanes]
  float* sum;            // [kLanes], sum of exp(z - maximum)
  float* weighted;       // [kLanes], sum of (z - maximum) exp(z - maximum); null if entropy is not wanted
  float* above;          // [kLanes], number of logits above the target's; null if the rank is not wanted
  const float* target;   // [kLanes], the target's logit; read only if `above` is given
};

// What happens to a product before the softmax: z = cap(scale * (product + bias)).
struct LogitTransform {
  float scale = 1.0f;
  float cap = 0.0f;  // 0: none
};

enum class Activation { kNone, kGelu, kSwiglu };

struct InnerKernels {
  const char* name;

  // c[r][lane] (+)= sum_k a[r * row_stride + k * step] * b[k][lane],  b [depth, kLanes], c [rows, kLanes].
  // Only the first `vectors` * kVector lanes are computed.
  void (*product)(const float* a, int64_t row_stride, int64_t step, int64_t rows, int64_t depth, const float* b,
                  float* c, bool add, int vectors);

  // z in place of the products c [rows, kLanes], rows `stride` apart; `bias` [rows] may be null.
  void (*logits)(float* c, int64_t stride, int64_t rows, const float* bias, LogitTransform transform, int vectors);

  // Takes the logits c [rows, kLanes], rows `stride` apart, into the running softmax.
  void (*absorb)(const float* c, int64_t stride, int64_t rows, LogitState state, int vectors);

  // Scores c [rows, kLanes] of keys first_key.. become weights exp(scale * (score - maximum)), with the new running
  // maximum; the running sum and accumulator [head_dim, kLanes] are rescaled to it. A lane sees keys below
  // limits[lane]; null limits: all. Rows of c and of the accumulator lie `stride` apart.
  void (*attend)(float* c, int64_t stride, int64_t rows, float scale, float first_key, const float* limits,
                 float* maximum, float* sum, float* accumulator, int64_t head_dim, int vectors);

  // y [rows, kLanes] = activation(y + bias) in place; kSwiglu writes silu(first half) * second half to the first half.
  void (*activate)(float* y, int64_t rows, const float* bias, Activation activation, int vectors);

  // Layer norm down each lane of y + residual, both [rows, kLanes], in place; gain and offset [rows].
  void (*normalise)(float* y, int64_t rows, const float* residual, const float* gain, const float* offset,
                    float epsilon, int vectors);

  // panel[k][lane] = scale * rows[lane][k], and back: rows[lane][k] = scales[lane] * panel[k][lane] (null scales: 1).
  // Rows of the panel lie `stride` apart. Both touch vectors * kVector lanes, so `rows` must have that many valid
  // pointers.
  void (*gather)(const float* const* rows, int64_t width, float scale, float* panel, int64_t stride, int vectors);
  void (*scatter)(const float* panel, int64_t stride, int64_t width, const float* scales, float* const* rows,
                  int vectors);
};

const InnerKernels& portable_kernels();
const InnerKernels* avx2_kernels();  // null where this build has none

// The fastest set this processor runs.
const InnerKernels& inner_kernels();

inline int vectors_for(int64_t lanes) {
  return static_cast<int>((lanes + kVector - 1) / kVector);
}

}  // namespace diffscore
