// Tile products by the processor's widest units: oneDNN's batch-reduced products, reached through ATen.
//
// A tile is a [rows, kBlockLanes] product of rows (of the vocabulary, of keys, of transposed values) with lanes that
// `pack_block` packed. Its shape depends on the problem's shapes alone, short tiles being padded, so that one
// generated kernel makes all sums of a depth and no lane's bits depend on the others.
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
constexpr int64_t kDepthStep = 32;                      // a depth's divisor: one AMX row of bfloat16
constexpr int64_t kWord = 4;                            // bytes; a float32 number or two bfloat16 neighbours

// Who multiplies: the inner loops, in float32 and panel by panel; or, in blocks of numbers of type `type`, brgemm or
// plain loops in its place, with which every processor can test what surrounds them.
struct Products {
  enum class By { kInner, kBrgemm, kPlain };
  By by = By::kInner;
  at::ScalarType type = at::kFloat;

  bool in_blocks() const { return by != By::kInner; }
  int64_t number_size() const { return in_blocks() && type == at::kBFloat16 ? 2 : 4; }
};

// Products as `asked`: "inner", "brgemm", "plain", or "auto" for the faster of the first two, by expectation. `unfit`
// says why the operation's inputs of type `type` cannot be multiplied in blocks; empty if they can. Raises where what
// is asked for cannot be had.
Products choose_products(const char* operation, std::string_view asked, at::ScalarType type, const std::string& unfit);

// Empty where brgemm can multiply `type` (float32, bfloat16) here and passed a check of exact products at its first
// use; else one sentence that says why not.
std::string brgemm_unavailable(at::ScalarType type);

// Empty where the system lets a process write machine code and run it, as oneDNN does; else why not. Asked once.
const std::string& generated_code_unavailable();

// packed[word][lane] = rows[lane][word]: float32 as it is; bfloat16 in pairs, as its instructions multiply them.
void pack_block(const char* const* rows, int64_t words, char* packed);

// c [rows, kBlockLanes] (+)= a [rows, depth] b, b packed. `row_stride`, in numbers, is of a.
void block_product(Products products, const char* a, int64_t row_stride, int64_t rows, int64_t depth, const char* b,
                   float* c, bool add);

// Around a thread's block products. At its end, by an exception as well, it frees the units that they took: AMX holds
// them until told.
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
