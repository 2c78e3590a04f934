#include "brgemm.h"

#include <ATen/Context.h>
#include <ATen/cpu/Utils.h>
#include <ATen/native/CPUBlas.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <exception>
#include <vector>

#include "rows.h"

namespace diffscore {
namespace {

bool processor_has(const char* feature) {
  const auto found = at::cpu::get_cpu_capabilities();
  const auto at = found.find(feature);
  return at != found.end() && at->second.isBool() && at->second.toBool();
}

// Tries what oneDNN does for its generated code: map a page, write to it, make it executable, without or with leave to
// write. Where a policy forbids that, oneDNN's brgemm would end the process.
std::string probe_generated_code() {
  const size_t size = sysconf(_SC_PAGESIZE);
  for (const int protection : {PROT_READ | PROT_EXEC, PROT_READ | PROT_WRITE | PROT_EXEC}) {
    void* page = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) return std::string("no page of memory for generated code: ") + std::strerror(errno);
    const int refused = mprotect(page, size, protection) == 0 ? 0 : errno;
    munmap(page, size);
    if (refused != 0)
      return std::string("the system grants no memory for generated code (") + std::strerror(refused) +
             "; MemoryDenyWriteExecute or SELinux's execmem)";
  }
  return "";
}

// Whether brgemm is expected to beat the inner loops: for bfloat16 wherever it runs, for float32 with AVX-512.
bool brgemm_preferred(at::ScalarType type) {
  static const bool wide = processor_has("avx512_f");
  return type == at::kBFloat16 || wide;
}

template <class Number>
void multiply(Products::By by, const char* a_bytes, int64_t row_stride, int64_t rows, int64_t depth,
              const char* b_bytes, float* c, int64_t c_stride, bool add) {
  constexpr int64_t in_word = kWord / sizeof(Number);
  const auto* a = reinterpret_cast<const Number*>(a_bytes);
  const auto* b = reinterpret_cast<const Number*>(b_bytes);
  if (by == Products::By::kBrgemm) {
    at::native::cpublas::brgemm(rows, kBlockLanes, depth, row_stride, kBlockLanes, c_stride, add, a, b, c, in_word > 1);
    return;
  }
  for (int64_t r = 0; r < rows; ++r) {
    float sums[kBlockLanes] = {};
    for (int64_t k = 0; k < depth; ++k) {
      const Number* row = b + k / in_word * kBlockLanes * in_word + k % in_word;
      for (int64_t lane = 0; lane < kBlockLanes; ++lane)
        sums[lane] += static_cast<float>(a[r * row_stride + k]) * static_cast<float>(row[lane * in_word]);
    }
    float* to = c + r * c_stride;
    for (int64_t lane = 0; lane < kBlockLanes; ++lane) to[lane] = add ? to[lane] + sums[lane] : sums[lane];
  }
}

// Checks products of two depth blocks, the second added to the first, in the shapes that the operations use. Numbers
// are multiples of 1/64 below 1, which bfloat16 represents, and sums multiples of 1/4096 below 512, which float32
// represents: in any order of summation the result must be exact.
template <class Number>
std::string check(at::ScalarType type) {
  constexpr int64_t max_rows = 128, depth = 384 + kDepthStep;
  const Products brgemm{Products::By::kBrgemm, type};
  std::vector<Number> a(max_rows * depth), b(kBlockLanes * depth);
  for (size_t i = 0; i < a.size(); ++i) a[i] = static_cast<float>(static_cast<int>(i * 37 % 101) - 50) / 64.0f;
  for (size_t i = 0; i < b.size(); ++i) b[i] = static_cast<float>(static_cast<int>(i * 53 % 97) - 48) / 64.0f;
  constexpr int64_t size = sizeof(Number), words = depth * size / kWord;
  std::vector<float> packed(kBlockLanes * words);
  const char* rows[kBlockLanes];
  for (int64_t lane = 0; lane < kBlockLanes; ++lane) rows[lane] = reinterpret_cast<const char*>(&b[lane * depth]);
  char* to = reinterpret_cast<char*>(packed.data());
  pack_block(rows, words, to);
  const char* from = reinterpret_cast<const char*>(a.data());
  struct Shape {
    int64_t rows, first;  // depth of the first block
  };
  for (const auto [height, first] : {Shape{kBlockRows, 384}, Shape{16, 32}, Shape{80, 96}, Shape{max_rows, 128}}) {
    std::vector<float> c(height * kBlockLanes, std::nanf(""));
    try {
      const ProductScope scope(brgemm);
      block_product(brgemm, from, depth, height, first, to, c.data(), false);
      block_product(brgemm, from + first * size, depth, height, kDepthStep, to + first * size * kBlockLanes, c.data(),
                    true);
    } catch (const c10::Error& error) {
      return std::string("oneDNN has no such kernel here: ") + error.what_without_backtrace();
    } catch (const std::exception& error) {
      return std::string("oneDNN has no such kernel here: ") + error.what();
    }
    for (int64_t r = 0; r < height; ++r) {
      for (int64_t lane = 0; lane < kBlockLanes; ++lane) {
        float exact = 0.0f;
        for (int64_t k = 0; k < first + kDepthStep; ++k)
          exact += static_cast<float>(a[r * depth + k]) * static_cast<float>(b[lane * depth + k]);
        if (c[r * kBlockLanes + lane] != exact) return "its products failed their check";
      }
    }
  }
  return "";
}

}  // namespace

const std::string& generated_code_unavailable() {
  static const std::string found = probe_generated_code();
  return found;
}

std::string brgemm_unavailable(at::ScalarType type) {
  if (type != at::kFloat && type != at::kBFloat16)
    return std::string("brgemm multiplies float32 and bfloat16 here, not ") + c10::toString(type);
  if (!generated_code_unavailable().empty()) return generated_code_unavailable();
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

Products choose_products(const char* operation, std::string_view asked, at::ScalarType type,
                         const std::string& unfit) {
  TORCH_CHECK(asked == "auto" || asked == "inner" || asked == "brgemm" || asked == "plain", operation,
              ": products must be auto, inner, brgemm or plain; got ", asked);
  if (asked == "inner") return {};
  // Asked before brgemm's own check, in which oneDNN generates code.
  if (asked == "auto" && (!unfit.empty() || !brgemm_preferred(type))) return {};
  std::string reason = unfit;
  if (reason.empty() && asked != "plain") reason = brgemm_unavailable(type);
  TORCH_CHECK(asked == "auto" || reason.empty(), operation, ": no products by ", asked, ": ", reason);
  if (!reason.empty()) return {};
  return {asked == "plain" ? Products::By::kPlain : Products::By::kBrgemm, type};
}

void pack_block(const char* const* rows, int64_t words, char* packed) {
  static_assert(kBlockLanes % kRowVector == 0);
  auto* to = reinterpret_cast<uint32_t*>(packed);
  for (int64_t lane = 0; lane < kBlockLanes; lane += kRowVector)
    row_kernels().gather_words(rows + lane, words, to + lane, kBlockLanes);
}

void block_product(Products products, const char* a, int64_t row_stride, int64_t rows, int64_t depth, const char* b,
                   float* c, bool add, int64_t c_stride) {
  if (products.type == at::kFloat) {
    multiply<float>(products.by, a, row_stride, rows, depth, b, c, c_stride, add);
  } else {
    multiply<c10::BFloat16>(products.by, a, row_stride, rows, depth, b, c, c_stride, add);
  }
}

ProductScope::~ProductScope() {
  if (products_.by == Products::By::kBrgemm) at::native::cpublas::brgemm_release(products_.type == at::kBFloat16);
}

}  // namespace diffscore
