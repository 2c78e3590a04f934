// The loops along rows for x86 processors with AVX-512. One build serves all processors: the check is at run time.
#include "rows.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")
#endif

namespace diffscore {
namespace {
constexpr const char* kInstructionSet = "avx512";
}
}  // namespace diffscore

#include "rows_loops.inc"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

const diffscore::RowKernels* diffscore::avx512_row_kernels() {
  return __builtin_cpu_supports("fma") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                 __builtin_cpu_supports("avx512vl")
             ? &kRowKernels
             : nullptr;
}

#else

const diffscore::RowKernels* diffscore::avx512_row_kernels() {
  return nullptr;
}

#endif
