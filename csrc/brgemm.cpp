#include "brgemm.h"

#include <ATen/Context.h>
#include <ATen/cpu/Utils.h>
#include <ATen/native/CPUBlas.h>

#include <cmath>
#include <cstring>
#include <exception>
#include <vector>

namespace diffscore {
namespace {

bool processor_has(const char* feature) {
  const auto found = at::cpu::get_cpu_capabilities();
  const auto at = found.find(feature);
  return at != found.end() && at->second.isBool() && at->second.toBool();
}

// Products of two depth blocks, the second added. Numbers are multiples of 1/64 below 1, which bfloat16 holds, and sums
// multiples of 1/4096 below 512, which float32 holds: whatever the order, the result must be exact.
template <class Number>
std::string check(at::ScalarType type) {
  constexpr int64_t first = 384, depth = first + 64;
  std::vector<Number> a(kBlockRows * depth), b(kBlockLanes * depth);
  for (size_t i = 0; i < a.size(); ++i) a[i] = static_cast<float>(static_cast<int>(i * 37 % 101) - 50) / 64.0f;
  for (size_t i = 0; i < b.size(); ++i) b[i] = static_cast<float>(static_cast<int>(i * 53 % 97) - 48) / 64.0f;
  std::vector<float> packed(kBlockLanes * depth), c(kBlockRows * kBlockLanes, std::nanf(""));
  const char* rows[kBlockLanes];
  for (int64_t lane = 0; lane < kBlockLanes; ++lane) rows[lane] = reinterpret_cast<const char*>(&b[lane * depth]);
  const int64_t words = depth * static_cast<int64_t>(sizeof(Number)) / kWord;
  char* to = reinterpret_cast<char*>(packed.data());
  pack_block(rows, words, to);
  const char* from = reinterpret_cast<const char*>(a.data());
  try {
    block_product(type, from, depth, first, to, c.data(), false);
    block_product(type, from + first * sizeof(Number), depth, depth - first,
                  to + words * first / depth * kBlockLanes * kWord, c.data(), true);
    end_products(type);
  } catch (const std::exception& error) {
    return std::string("oneDNN has no such kernel here: ") + error.what();
  }
  for (int64_t r = 0; r < kBlockRows; ++r) {
    for (int64_t lane = 0; lane < kBlockLanes; ++lane) {
      float exact = 0.0f;
      for (int64_t k = 0; k < depth; ++k)
        exact += static_cast<float>(a[r * depth + k]) * static_cast<float>(b[lane * depth + k]);
      if (c[r * kBlockLanes + lane] != exact) return "its products failed their check";
    }
  }
  return "";
}

}  // namespace

std::string brgemm_unavailable(at::ScalarType type) {
  if (!at::globalContext().userEnabledMkldnn()) return "oneDNN is switched off (torch.backends.mkldnn)";
  if (type == at::kFloat) {
    static const std::string found =
        processor_has("avx2") ? check<float>(type) : "the processor has no AVX2";
    return found;
  }
  static const std::string found = processor_has("avx512_bf16") || processor_has("amx_bf16")
                                       ? check<c10::BFloat16>(type)
                                       : "the processor multiplies no bfloat16 (neither AMX nor AVX-512 BF16)";
  return found;
}

bool brgemm_preferred(at::ScalarType type) {
  static const bool wide = processor_has("avx512_f");
  return type == at::kBFloat16 || wide;
}

void pack_block(const char* const* rows, int64_t words, char* packed) {
  for (int64_t lane = 0; lane < kBlockLanes; ++lane) {
    for (int64_t word = 0; word < words; ++word)
      std::memcpy(packed + (word * kBlockLanes + lane) * kWord, rows[lane] + word * kWord, kWord);
  }
}

void block_product(at::ScalarType type, const char* a, int64_t row_stride, int64_t depth, const char* b, float* c,
                   bool add) {
  if (type == at::kFloat) {
    at::native::cpublas::brgemm(kBlockRows, kBlockLanes, depth, row_stride, kBlockLanes, kBlockLanes, add,
                                reinterpret_cast<const float*>(a), reinterpret_cast<const float*>(b), c, false);
  } else {
    at::native::cpublas::brgemm(kBlockRows, kBlockLanes, depth, row_stride, kBlockLanes, kBlockLanes, add,
                                reinterpret_cast<const c10::BFloat16*>(a), reinterpret_cast<const c10::BFloat16*>(b),
                                c, true);
  }
}

void end_products(at::ScalarType type) {
  at::native::cpublas::brgemm_release(type == at::kBFloat16);
}

}  // namespace diffscore
