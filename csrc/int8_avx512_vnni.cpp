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
