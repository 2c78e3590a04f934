// Tile products by the processor's widest units: oneDNN's brgemm (batch-reduced matmul), called through ATen.
//
// A tile is a [rows, kBlockLanes] product of rows (of the vocabulary, of keys, of transposed values) with lanes that
// `pack_block` packed. Short tiles are padded, so that a tile's shape depends on the problem's shapes only. One
// generated kernel then makes all sums of a depth, and no lane's bits depend on the others.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "inner.h"

namespace diffscore {

constexpr int64_t kBlockRows = 64;
constexpr int64_t kBlockPanels = 2;
constexpr int64_t kBlockLanes = kBlockPanels * kLanes;  // 48: AMX tiles and AVX-512 registers hold 16 numbers
constexpr int64_t kDepthStep = 32;                      // depths are multiples of it: one AMX row of bfloat16
constexpr int64_t kWord = 4;                            // bytes; a float32 number or two bfloat16 neighbours

// How products are made: by the inner loops, in float32 and panel by panel; or in blocks of numbers of `type`, by brgemm
// or by plain loops in its place. With plain loops the code around blocks can be tested on every processor.
struct Products {
  enum class By { kInner, kBrgemm, kPlain };
  By by = By::kInner;
  at::ScalarType type = at::kFloat;

  bool in_blocks() const { return by != By::kInner; }
  int64_t number_size() const { return in_blocks() && type == at::kBFloat16 ? 2 : 4; }
};

// Products as `asked`: "inner", "brgemm", "plain", or "auto" for the one of the first two that is expected to be faster.
// `unfit` says why the operation's inputs of type `type` cannot be multiplied in blocks; empty if they can. Raises if
// the products asked for cannot be made.
Products choose_products(const char* operation, std::string_view asked, at::ScalarType type, const std::string& unfit);

// Empty where brgemm can multiply `type` (float32, bfloat16) here and passed a check of exact products, which is made
// at the first call; else one sentence that says why not.
std::string brgemm_unavailable(at::ScalarType type);

// Empty where the system lets a process write machine code and run it, as oneDNN does; else why not. Asked once.
const std::string& generated_code_unavailable();

// packed[word][lane] = rows[lane][word]: one float32, or a pair of bfloat16, as bfloat16 instructions read them.
void pack_block(const char* const* rows, int64_t words, char* packed);

// c [rows, kBlockLanes] (+)= a [rows, depth] b, with b packed. Rows of a lie `row_stride` numbers apart, of c `c_stride`.
void block_product(Products products, const char* a, int64_t row_stride, int64_t rows, int64_t depth, const char* b,
                   float* c, bool add, int64_t c_stride = kBlockLanes);

// Lives around a thread's block products. Its destructor releases the AMX units, which a thread otherwise keeps.
class ProductScope {
 public:
  explicit ProductScope(Products products) : products_(products) {}
  ~ProductScope();
  ProductScope(const ProductScope&) = delete;
  ProductScope& operator=(const ProductScope&) = delete;

 private:
  const Products products_;
};

}  // namespace diffscore
