// Products of float32 rows with int8 weights: the rows are quantised one by one, sums are exact, the epilogue is float32.
//
// A block of rows is quantised once. It then meets the weight panel by panel; each panel's sums become numbers of the
// result while they are in cache.
#include "inner.h"
#include "int8_rows.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

namespace diffscore {
namespace {

void check_vector(const std::optional<at::Tensor>& tensor, int64_t size, const char* name) {
  TORCH_CHECK(!tensor || (tensor->dim() == 1 && tensor->size(0) == size && tensor->scalar_type() == at::kFloat),
              "int8_linear: ", name, " must be [", size, "] float32");
}

std::tuple<at::Tensor, at::Tensor> pack(const at::Tensor& codes_in, int64_t groups) {
  TORCH_CHECK(codes_in.dim() == 2 && codes_in.scalar_type() == at::kChar && codes_in.size(1) > 0,
              "int8_pack: codes must be [M, K] int8; got ", codes_in.sizes(), " ", codes_in.scalar_type());
  TORCH_CHECK((groups == 1 || groups == 2) && codes_in.size(0) % groups == 0,
              "int8_pack: groups must be 1, or 2 for an even number of rows; got ", groups);
  TORCH_CHECK(codes_in.size(1) <= kMaxDepth8, "int8_pack: rows of ", codes_in.size(1), " numbers; at most ", kMaxDepth8,
              " have sums that fit in 32 bits");
  check_bounds("int8_pack", "the weight", codes_in.size(0), codes_in.size(1));
  const at::Tensor codes = codes_in.contiguous();
  const int64_t depth = codes.size(1), quads = (depth + kQuad - 1) / kQuad, rows = codes.size(0) / groups;
  const int64_t panels = (rows + kPanel - 1) / kPanel;
  at::Tensor packed = at::zeros({groups * panels, quads, kPanel, kQuad}, codes.options());
  at::Tensor sums = at::zeros({groups * panels * kPanel}, codes.options().dtype(at::kInt));
  const int8_t* from = codes.const_data_ptr<int8_t>();
  int8_t* to = packed.data_ptr<int8_t>();
  int32_t* total = sums.data_ptr<int32_t>();
  for (int64_t row = 0; row < groups * rows; ++row) {
    const int64_t place = row / rows * panels * kPanel + row % rows;
    int8_t* own = to + (place / kPanel * quads * kPanel + place % kPanel) * kQuad;
    for (int64_t k = 0; k < depth; ++k) {
      own[k / kQuad * kPanel * kQuad + k % kQuad] = from[row * depth + k];
      total[place] += from[row * depth + k];
    }
  }
  return {packed, sums};
}

// A layer norm of the product plus a residual; null pointers where there is none.
struct ResidualNorm {
  at::Tensor residual, gain, offset;
  float epsilon;

  ResidualNorm(int64_t rows, int64_t width, const std::optional<at::Tensor>& residual_in,
               const std::optional<at::Tensor>& gain_in, const std::optional<at::Tensor>& offset_in, double epsilon_in)
      : epsilon(static_cast<float>(epsilon_in)) {
    TORCH_CHECK(residual_in.has_value() == gain_in.has_value() && gain_in.has_value() == offset_in.has_value(),
                "int8_linear: residual, gain and offset come together");
    if (!residual_in) return;
    TORCH_CHECK(residual_in->dim() == 2 && residual_in->size(0) == rows && residual_in->size(1) == width &&
                    residual_in->scalar_type() == at::kFloat,
                "int8_linear: residual must be [", rows, ", ", width, "] float32");
    check_vector(gain_in, width, "gain");
    check_vector(offset_in, width, "offset");
    residual = last_contiguous(*residual_in);
    gain = gain_in->contiguous();
    offset = offset_in->contiguous();
  }

  // Rows first .. first + count of the result, in place.
  void apply(const Int8Kernels& inner, float* out, int64_t width, int64_t first, int64_t count) const {
    if (!residual.defined()) return;
    for (int64_t row = first; row < first + count; ++row)
      inner.normalise(out + row * width, residual.const_data_ptr<float>() + row * residual.stride(0),
                      gain.const_data_ptr<float>(), offset.const_data_ptr<float>(), width, epsilon);
  }
};

Activation activation_named(std::string_view name) {
  TORCH_CHECK(name == "none" || name == "gelu" || name == "swiglu",
              "int8_linear: activation must be none, gelu or swiglu; got ", name);
  return name == "gelu" ? Activation::kGelu : name == "swiglu" ? Activation::kSwiglu : Activation::kNone;
}

// Room for one panel of a block's products.
struct Tiles {
  Scratch sums, own, up;
  explicit Tiles(int64_t block) : sums(block * kPanel), own(block * kPanel), up(block * kPanel) {}
};

// out [count, kept] = activation(rows * weight + bias); rows of out are neighbours.
void multiply(const Int8Kernels& inner, const Int8Weight& weight, Activation activation, const QuantisedRows& rows,
              Tiles& tiles, float* out, int64_t kept) {
  const int64_t count = rows.count();
  for (int64_t panel = 0; panel < weight.panels; ++panel) {
    weight.product(panel, rows, tiles.sums.get(), tiles.own.get());
    if (activation == Activation::kGelu) inner.gelu(tiles.own.get(), count * kPanel);
    if (activation == Activation::kSwiglu) {
      weight.product(weight.panels + panel, rows, tiles.sums.get(), tiles.up.get());
      inner.gate(tiles.own.get(), tiles.up.get(), count * kPanel);
    }
    const int64_t column = panel * kPanel, columns = std::min(kPanel, kept - column);
    for (int64_t r = 0; r < count; ++r)
      std::memcpy(out + r * kept + column, tiles.own.get() + r * kPanel, columns * sizeof(float));
  }
}

at::Tensor linear(const at::Tensor& x_in, const at::Tensor& packed, const at::Tensor& sums, const at::Tensor& scale,
                  const std::optional<at::Tensor>& bias, std::string_view activation_name,
                  const std::optional<at::Tensor>& residual, const std::optional<at::Tensor>& gain,
                  const std::optional<at::Tensor>& offset, double epsilon, std::string_view loops) {
  const Activation activation = activation_named(activation_name);
  const int64_t groups = activation == Activation::kSwiglu ? 2 : 1, width = scale.numel(), kept = width / groups;
  TORCH_CHECK(width % groups == 0, "int8_linear: swiglu needs an even number of weight rows");
  check_rows("int8_linear", x_in);
  check_packed("int8_linear", x_in.size(1), packed, sums, scale, groups);
  check_vector(bias, width, "bias");
  const Int8Kernels& inner = int8_kernels_named(loops);
  const at::Tensor x = last_contiguous(x_in);
  const int64_t rows = x.size(0), depth = x.size(1), block = block_rows(rows);
  const ResidualNorm norm(rows, kept, residual, gain, offset, epsilon);
  const Int8Weight weight(inner, packed, sums, scale, bias, groups);
  at::Tensor out = at::empty({rows, kept}, x.options());
  float* to = out.data_ptr<float>();
  share_units((rows + block - 1) / block, [&](const auto& claim) {
    QuantisedRows own(block, depth);
    Tiles tiles(block);
    for (int64_t unit; claim(unit);) {
      const int64_t first = unit * block, count = std::min(block, rows - first);
      own.read(inner, x.const_data_ptr<float>() + first * x.stride(0), x.stride(0), count);
      multiply(inner, weight, activation, own, tiles, to + first * kept, kept);
      norm.apply(inner, to, kept, first, count);
    }
  });
  return out;
}

// Two layers; what lies between them stays in cache.
at::Tensor feed_forward(const at::Tensor& x_in, const at::Tensor& up_packed, const at::Tensor& up_sums,
                        const at::Tensor& up_scale, const std::optional<at::Tensor>& up_bias,
                        std::string_view activation_name, const at::Tensor& down_packed, const at::Tensor& down_sums,
                        const at::Tensor& down_scale, const std::optional<at::Tensor>& down_bias,
                        const std::optional<at::Tensor>& residual, const std::optional<at::Tensor>& gain,
                        const std::optional<at::Tensor>& offset, double epsilon, std::string_view loops) {
  const Activation activation = activation_named(activation_name);
  const int64_t groups = activation == Activation::kSwiglu ? 2 : 1, between = up_scale.numel() / groups;
  TORCH_CHECK(up_scale.numel() % groups == 0, "int8_feed_forward: swiglu needs an even number of weight rows");
  check_rows("int8_feed_forward", x_in);
  check_packed("int8_feed_forward", x_in.size(1), up_packed, up_sums, up_scale, groups);
  check_packed("int8_feed_forward", between, down_packed, down_sums, down_scale, 1);
  check_vector(up_bias, up_scale.numel(), "the first bias");
  check_vector(down_bias, down_scale.numel(), "the second bias");
  const Int8Kernels& inner = int8_kernels_named(loops);
  const at::Tensor x = last_contiguous(x_in);
  const int64_t rows = x.size(0), block = std::min(block_rows(rows), kWideBlockRows8), kept = down_scale.numel();
  const ResidualNorm norm(rows, kept, residual, gain, offset, epsilon);
  const Int8Weight up(inner, up_packed, up_sums, up_scale, up_bias, groups);
  const Int8Weight down(inner, down_packed, down_sums, down_scale, down_bias, 1);
  at::Tensor out = at::empty({rows, kept}, x.options());
  float* to = out.data_ptr<float>();
  share_units((rows + block - 1) / block, [&](const auto& claim) {
    QuantisedRows own(block, x.size(1)), second(block, between);
    Tiles tiles(block);
    Scratch expanded(block * between);
    for (int64_t unit; claim(unit);) {
      const int64_t first = unit * block, count = std::min(block, rows - first);
      own.read(inner, x.const_data_ptr<float>() + first * x.stride(0), x.stride(0), count);
      multiply(inner, up, activation, own, tiles, expanded.get(), between);
      second.read(inner, expanded.get(), between, count);
      multiply(inner, down, Activation::kNone, second, tiles, to + first * kept, kept);
      norm.apply(inner, to, kept, first, count);
    }
  });
  return out;
}

std::vector<std::string> loops() {
  std::vector<std::string> names;
  for (const Int8Kernels* set : int8_kernels()) names.emplace_back(set->name);
  return names;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(diffscore_fast, m) {
  m.def("int8_pack(Tensor codes, int groups) -> (Tensor, Tensor)");
  m.def(
      "int8_linear(Tensor x, Tensor packed, Tensor sums, Tensor scale, Tensor? bias, str activation, Tensor? residual, "
      "Tensor? gain, Tensor? offset, float epsilon, str loops) -> Tensor");
  m.def(
      "int8_feed_forward(Tensor x, Tensor up_packed, Tensor up_sums, Tensor up_scale, Tensor? up_bias, str activation, "
      "Tensor down_packed, Tensor down_sums, Tensor down_scale, Tensor? down_bias, Tensor? residual, Tensor? gain, "
      "Tensor? offset, float epsilon, str loops) -> Tensor");
  m.def("int8_loops() -> str[]", loops);
}

TORCH_LIBRARY_IMPL(diffscore_fast, CPU, m) {
  m.impl("int8_pack", pack);
  m.impl("int8_linear", linear);
  m.impl("int8_feed_forward", feed_forward);
}

}  // namespace diffscore
