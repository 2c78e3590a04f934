// The int8 loops for x86 processors with AVX-512 VNNI.
#include "int8_kernels.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))

#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"))), apply_to = function)
#pragma clang fp contract(off)
#else
#pragma GCC push_options
#pragma GCC target("avx2,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#pragma GCC optimize("fp-contract=off")
#endif

namespace diffscore {
namespace {

constexpr const char* kInstructionSet = "avx512_vnni";
constexpr int32_t kShift = 128;  // vpdpbusd multiplies unsigned activations by signed weights
constexpr int kTall = 6;         // 6 x 4 sums, 4 weights and an activation: 29 of 32 registers

template <int kRows>
void product_rows(const uint8_t* x, int64_t stride, const int8_t* w, int64_t quads, const int32_t* start,
                  int32_t* sums) {
  constexpr int kVectors = kPanel / 16;
  __m512i total[kRows][kVectors];
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      total[r][v] = _mm512_loadu_si512((start ? start : sums + r * kPanel) + v * 16);
  }
  for (int64_t q = 0; q < quads; ++q) {
    __m512i weight[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) weight[v] = _mm512_loadu_si512(w + (q * kPanel + v * 16) * kQuad);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      int32_t word;
      __builtin_memcpy(&word, x + r * stride + q * kQuad, sizeof word);
      const __m512i four = _mm512_set1_epi32(word);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) total[r][v] = _mm512_dpbusd_epi32(total[r][v], four, weight[v]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) _mm512_storeu_si512(sums + r * kPanel + v * 16, total[r][v]);
  }
}

// The shift of listed quads is not in a sum that was made before: it is summed here, as a row of its own.
template <int kRows>
void add_high_rows(const uint8_t* high, int64_t stride, const int8_t* w, const int32_t* quads, int64_t count,
                   int32_t* sums) {
  constexpr int kVectors = kPanel / 16;
  __m512i total[kRows][kVectors], shifts[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    shifts[v] = _mm512_setzero_si512();
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) total[r][v] = _mm512_setzero_si512();
  }
  const __m512i shift = _mm512_set1_epi8(static_cast<char>(kShift));
  for (int64_t i = 0; i < count; ++i) {
    const int8_t* own = w + quads[i] * kPanel * kQuad;
    __m512i four[kRows];
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      int32_t word;
      __builtin_memcpy(&word, high + r * stride + quads[i] * kQuad, sizeof word);
      four[r] = _mm512_set1_epi32(word);
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const __m512i weight = _mm512_loadu_si512(own + v * 16 * kQuad);
      shifts[v] = _mm512_dpbusd_epi32(shifts[v], shift, weight);
#pragma GCC unroll 6
      for (int r = 0; r < kRows; ++r) total[r][v] = _mm512_dpbusd_epi32(total[r][v], four[r], weight);
    }
  }
  const __m512i factor = _mm512_set1_epi32(kHigh);
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      int32_t* to = sums + r * kPanel + v * 16;
      const __m512i part = _mm512_mullo_epi32(_mm512_sub_epi32(total[r][v], shifts[v]), factor);
      _mm512_storeu_si512(to, _mm512_add_epi32(_mm512_loadu_si512(to), part));
    }
  }
}

void add_high(const uint8_t* high, int64_t stride, int64_t rows, const int8_t* w, const int32_t* quads, int64_t count,
              int32_t* sums) {
  int64_t r = 0;
  for (; r + 3 <= rows; r += 3) add_high_rows<3>(high + r * stride, stride, w, quads, count, sums + r * kPanel);
  for (; r < rows; ++r) add_high_rows<1>(high + r * stride, stride, w, quads, count, sums + r * kPanel);
}

}  // namespace
}  // namespace diffscore

#include "int8_loops.inc"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

const diffscore::Int8Kernels* diffscore::int8_avx512_vnni() {
  const bool has = __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return has ? &kKernels : nullptr;
}

#else

const diffscore::Int8Kernels* diffscore::int8_avx512_vnni() {
  return nullptr;
}

#endif
