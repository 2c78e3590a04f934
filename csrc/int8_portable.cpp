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

#include "int8_add_high.inc"

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
