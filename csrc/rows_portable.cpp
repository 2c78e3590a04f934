// The loops along rows for any processor, and the choice between the sets.
#include "rows.h"

namespace diffscore {
namespace {
constexpr const char* kInstructionSet = "portable";
}
}  // namespace diffscore

#include "rows_loops.inc"

namespace diffscore {

const RowKernels& portable_row_kernels() {
  return kRowKernels;
}

const RowKernels& row_kernels() {
  static const RowKernels& chosen = avx512_row_kernels() ? *avx512_row_kernels()
                                    : avx2_row_kernels() ? *avx2_row_kernels()
                                                         : portable_row_kernels();
  return chosen;
}

}  // namespace diffscore
