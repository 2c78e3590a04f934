// The int8 loops for x86 processors with AVX2.
#include "int8_kernels.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))

#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#pragma clang fp contract(off)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#pragma GCC optimize("fp-contract=off")
#endif

namespace diffscore {
namespace {

constexpr const char* kInstructionSet = "avx2";
constexpr int32_t kShift = 0;
constexpr int kTall = 4;  // 4 x 2 sums, and the weights with their magnitudes, fill the 16 registers

// vpmaddubsw multiplies unsigned by signed and saturates a sum of two products at 32767. Here it gets |w| <= 128 and
// x with the sign of w, |x| <= 127: 2 * 128 * 127 is below.
template <int kRows>
void product_rows(const uint8_t* x, int64_t stride, const int8_t* w, int64_t quads, const int32_t* start,
                  int32_t* sums) {
  constexpr int kVectors = 2, kColumns = kVectors * 8;
  const __m256i ones = _mm256_set1_epi16(1);
  for (int64_t first = 0; first < kPanel; first += kColumns) {
    __m256i total[kRows][kVectors];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        const int32_t* from = start ? start : sums + r * kPanel;
        total[r][v] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + first + v * 8));
      }
    }
    for (int64_t q = 0; q < quads; ++q) {
      __m256i weight[kVectors], magnitude[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        weight[v] = _mm256_loadu_si256(
            reinterpret_cast<const __m256i*>(w + (q * kPanel + first + v * 8) * kQuad));
        magnitude[v] = _mm256_abs_epi8(weight[v]);
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        int32_t word;
        __builtin_memcpy(&word, x + r * stride + q * kQuad, sizeof word);
        const __m256i four = _mm256_set1_epi32(word);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          const __m256i pairs = _mm256_maddubs_epi16(magnitude[v], _mm256_sign_epi8(four, weight[v]));
          total[r][v] = _mm256_add_epi32(total[r][v], _mm256_madd_epi16(pairs, ones));
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums + r * kPanel + first + v * 8), total[r][v]);
    }
  }
}

#include "int8_add_high.inc"

}  // namespace
}  // namespace diffscore

#include "int8_loops.inc"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

const diffscore::Int8Kernels* diffscore::int8_avx2() {
  return __builtin_cpu_supports("avx2") ? &kKernels : nullptr;
}

#else

const diffscore::Int8Kernels* diffscore::int8_avx2() {
  return nullptr;
}

#endif
