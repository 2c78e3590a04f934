// Tile products by the processor's widest units: oneDNN's batch-reduced products, reached through ATen.
//
// The tile is a [kBlockRows, kBlockLanes] product of vocabulary rows, read where they lie, with hidden states packed by
// `pack_block`. Its shape is the same in every call, the last tile being padded, so that one generated kernel makes all
// sums of a depth and no row's bits depend on the others.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>

#include "inner.h"

namespace diffscore {

constexpr int64_t kBlockRows = 64;
constexpr int64_t kBlockPanels = 2;
constexpr int64_t kBlockLanes = kBlockPanels * kLanes;  // 48: AMX tiles and AVX-512 registers hold 16 numbers

// Empty where products of `type` (float32, bfloat16) can run here and passed a check against float64 at their first
// use; else one sentence that says why not.
std::string brgemm_unavailable(at::ScalarType type);

// Whether they are also expected to be faster than the inner loops: the processor has AVX-512 for float32. For
// bfloat16 that is a condition of running at all.
bool brgemm_preferred(at::ScalarType type);

constexpr int64_t kWord = 4;  // bytes; a float32 number or two bfloat16 neighbours

// packed[word][lane] = rows[lane][word]: float32 as it is; bfloat16 in pairs, as its instructions multiply them.
void pack_block(const char* const* rows, int64_t words, char* packed);

// c [kBlockRows, kBlockLanes] (+)= a [kBlockRows, depth] b, b packed. `row_stride` in numbers.
void block_product(at::ScalarType type, const char* a, int64_t row_stride, int64_t depth, const char* b, float* c,
                   bool add);

// Frees the units that the thread's products took (AMX holds them until told).
void end_products(at::ScalarType type);

// Does so where its scope ends, by an exception as well.
class Products {
 public:
  Products(bool brgemm, at::ScalarType type) : brgemm_(brgemm), type_(type) {}
  ~Products() {
    if (brgemm_) end_products(type_);
  }
  Products(const Products&) = delete;
  Products& operator=(const Products&) = delete;

 private:
  const bool brgemm_;
  const at::ScalarType type_;
};

}  // namespace diffscore
