// The int8 loops for any processor, and the choice between the sets.
#include "int8_kernels.h"

#include <c10/util/Exception.h>

#if defined(__clang__)
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif

namespace diffscore {
namespace {

constexpr const char* kInstructionSet = "portable";
constexpr int32_t kShift = 0;
constexpr int kTall = 1;

template <int kRows>
void product_rows(const uint8_t* x, int64_t stride, const int8_t* w, int64_t quads, const int32_t* start,
                  int32_t* sums) {
  for (int r = 0; r < kRows; ++r) {
    const auto* row = reinterpret_cast<const int8_t*>(x + r * stride);
    int32_t* to = sums + r * kPanel;
    if (start) __builtin_memcpy(to, start, kPanel * sizeof(int32_t));
    for (int64_t k = 0; k < quads * kQuad; ++k) {
      const int8_t* column = w + k / kQuad * kPanel * kQuad + k % kQuad;
      for (int64_t c = 0; c < kPanel; ++c) to[c] += int32_t{row[k]} * column[c * kQuad];
    }
  }
}

void add_high(const uint8_t* high, int64_t stride, int64_t rows, const int8_t* w, const int32_t* quads, int64_t count,
              int32_t* sums) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < count; ++i) {
      const auto* four = reinterpret_cast<const int8_t*>(high + r * stride + quads[i] * kQuad);
      const int8_t* own = w + quads[i] * kPanel * kQuad;
      for (int64_t c = 0; c < kPanel; ++c) {
        int32_t sum = 0;
        for (int64_t k = 0; k < kQuad; ++k) sum += int32_t{four[k]} * own[c * kQuad + k];
        sums[r * kPanel + c] += kHigh * sum;
      }
    }
  }
}

}  // namespace
}  // namespace diffscore

#include "int8_loops.inc"

namespace diffscore {

const Int8Kernels& int8_portable() {
  return kKernels;
}

const std::vector<const Int8Kernels*>& int8_kernels() {
  static const std::vector<const Int8Kernels*> found = [] {
    std::vector<const Int8Kernels*> sets;
    for (const Int8Kernels* set : {int8_avx512_vnni(), int8_avx2(), &int8_portable()}) {
      if (set) sets.push_back(set);
    }
    return sets;
  }();
  return found;
}

const Int8Kernels& int8_kernels_named(std::string_view name) {
  if (name == "auto") return *int8_kernels().front();
  for (const Int8Kernels* set : int8_kernels()) {
    if (name == set->name) return *set;
  }
  TORCH_CHECK(false, "no int8 loops named ", name, " run on this processor");
}

}  // namespace diffscore
