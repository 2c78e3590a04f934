// The loops along rows for x86 processors with AVX2. One build serves all processors: the check is at run time.
#include "rows.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif

namespace diffscore {
namespace {
constexpr const char* kInstructionSet = "avx2";
}
}  // namespace diffscore

#include "rows_loops.inc"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

const diffscore::RowKernels* diffscore::avx2_row_kernels() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &kRowKernels : nullptr;
}

#else

const diffscore::RowKernels* diffscore::avx2_row_kernels() {
  return nullptr;
}

#endif
