// The inner loops for any processor, and the choice between the sets.
#include "inner.h"

namespace diffscore {
namespace {
constexpr const char* kInstructionSet = "portable";
}
}  // namespace diffscore

#include "inner_loops.inc"

namespace diffscore {

const InnerKernels& portable_kernels() {
  return kKernels;
}

const InnerKernels& inner_kernels() {
  static const InnerKernels& chosen = avx2_kernels() ? *avx2_kernels() : portable_kernels();
  return chosen;
}

}  // namespace diffscore
