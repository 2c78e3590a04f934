// The body's matmuls with their epilogue in cache: bias, GELU or SwiGLU, residual and layer norm.
//
// Rows of x are the lanes. Up to four panels of 24 lanes share a walk over the weight, 64 of its rows at a time, so
// that the panels after the first read a tile of the weight from the second-level cache. The epilogue works down the
// lanes of a finished panel.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string_view>

#include "convert.h"
#include "inner.h"
#include "parallel.h"

namespace diffscore {
namespace {

constexpr int64_t kTileRows = 64;
constexpr int64_t kMaxPanels = 4;

struct Problem {
  const float *x, *weight, *bias, *residual, *gain, *offset;
  int64_t rows, depth, width, kept;  // weight [width, depth]; `kept` columns of the result
  int64_t x_stride, weight_stride, residual_stride;
  Activation activation;
  float epsilon;
  float* out;  // [rows, kept]
};

// Pointers to the panel's rows of a matrix; lanes beyond the last row point at `spare`.
template <class Number>
void point_at_rows(Number* matrix, int64_t stride, int64_t first, int64_t count, Number* spare, Number** rows) {
  for (int64_t lane = 0; lane < kLanes; ++lane) rows[lane] = lane < count ? matrix + (first + lane) * stride : spare;
}

void run(const InnerKernels& inner, const Problem& problem) {
  const int64_t panels = (problem.rows + kLanes - 1) / kLanes, threads = at::get_num_threads();
  // A chunk is smaller where there are few rows, so that all threads get work; it changes no sum.
  const int64_t chunk = std::clamp<int64_t>(panels / threads, 1, kMaxPanels);
  share_units((panels + chunk - 1) / chunk, [&](const auto& claim) {
    const int64_t x_size = problem.depth * kLanes, y_size = problem.width * kLanes;
    const int64_t spare_size = std::max(problem.depth, problem.kept);
    Scratch x(chunk * x_size), y(chunk * y_size), residual(problem.kept * kLanes), spare(spare_size);
    std::fill_n(spare.get(), spare_size, 0.0f);
    const float* from[kLanes];
    float* to[kLanes];
    for (int64_t unit; claim(unit);) {
      const int64_t first_panel = unit * chunk, here = std::min(chunk, panels - first_panel);
      const auto lanes_in = [&](int64_t p) {
        return std::min(kLanes, problem.rows - (first_panel + p) * kLanes);
      };
      for (int64_t p = 0; p < here; ++p) {
        point_at_rows<const float>(problem.x, problem.x_stride, (first_panel + p) * kLanes, lanes_in(p), spare.get(),
                                   from);
        inner.gather(from, problem.depth, 1.0f, x.get() + p * x_size, kLanes, vectors_for(lanes_in(p)));
      }
      for (int64_t first = 0; first < problem.width; first += kTileRows) {
        const int64_t rows = std::min(kTileRows, problem.width - first);
        for (int64_t p = 0; p < here; ++p) {
          for (int64_t k = 0; k < problem.depth; k += kDepthBlock) {
            inner.product(problem.weight + first * problem.weight_stride + k, problem.weight_stride, 1, rows,
                          std::min(kDepthBlock, problem.depth - k), x.get() + p * x_size + k * kLanes,
                          y.get() + p * y_size + first * kLanes, k > 0, vectors_for(lanes_in(p)));
          }
        }
      }
      for (int64_t p = 0; p < here; ++p) {
        const int64_t lanes = lanes_in(p), row = (first_panel + p) * kLanes;
        const int vectors = vectors_for(lanes);
        float* own = y.get() + p * y_size;
        inner.activate(own, problem.width, problem.bias, problem.activation, vectors);
        if (problem.residual) {
          point_at_rows<const float>(problem.residual, problem.residual_stride, row, lanes, spare.get(), from);
          inner.gather(from, problem.kept, 1.0f, residual.get(), kLanes, vectors);
          inner.normalise(own, problem.kept, residual.get(), problem.gain, problem.offset, problem.epsilon, vectors);
        }
        point_at_rows<float>(problem.out, problem.kept, row, lanes, spare.get(), to);
        inner.scatter(own, kLanes, problem.kept, nullptr, to, vectors);
        std::fill_n(spare.get(), spare_size, 0.0f);
      }
    }
  });
}

std::optional<at::Tensor> contiguous(const std::optional<at::Tensor>& tensor) {
  return tensor ? std::optional(tensor->contiguous()) : std::nullopt;
}

const float* data(const std::optional<at::Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr<float>() : nullptr;
}

void check_vector(const std::optional<at::Tensor>& tensor, int64_t size, const char* name) {
  TORCH_CHECK(!tensor || (tensor->dim() == 1 && tensor->size(0) == size && tensor->scalar_type() == at::kFloat),
              "linear: ", name, " must be [", size, "] float32");
}

at::Tensor linear(const at::Tensor& x_in, const at::Tensor& weight_in, const std::optional<at::Tensor>& bias_in,
                  std::string_view activation, const std::optional<at::Tensor>& residual_in,
                  const std::optional<at::Tensor>& gain_in, const std::optional<at::Tensor>& offset_in,
                  double epsilon) {
  TORCH_CHECK(x_in.dim() == 2 && x_in.scalar_type() == at::kFloat, "linear: x must be [N, K] float32; got ",
              x_in.sizes(), " ", x_in.scalar_type());
  TORCH_CHECK(weight_in.dim() == 2 && weight_in.size(1) == x_in.size(1) && x_in.size(1) > 0 &&
                  weight_in.scalar_type() == at::kFloat,
              "linear: weight must be [M, ", x_in.size(1), "] float32; got ", weight_in.sizes(), " ",
              weight_in.scalar_type());
  TORCH_CHECK(activation == "none" || activation == "gelu" || activation == "swiglu", "linear: activation must be "
              "none, gelu or swiglu; got ", activation);
  check_bounds("linear", "x", x_in.size(0), x_in.size(1));
  check_bounds("linear", "the weight", weight_in.size(0), weight_in.size(1));
  const bool gated = activation == "swiglu";
  TORCH_CHECK(!gated || weight_in.size(0) % 2 == 0, "linear: swiglu needs an even number of weight rows");
  const int64_t kept = gated ? weight_in.size(0) / 2 : weight_in.size(0);
  TORCH_CHECK(residual_in.has_value() == gain_in.has_value() && gain_in.has_value() == offset_in.has_value(),
              "linear: residual, gain and offset come together");
  TORCH_CHECK(!residual_in || (residual_in->dim() == 2 && residual_in->size(0) == x_in.size(0) &&
                               residual_in->size(1) == kept && residual_in->scalar_type() == at::kFloat),
              "linear: residual must be [", x_in.size(0), ", ", kept, "] float32");
  check_vector(bias_in, weight_in.size(0), "bias");
  check_vector(gain_in, kept, "gain");
  check_vector(offset_in, kept, "offset");
  const std::optional<at::Tensor> bias = contiguous(bias_in), gain = contiguous(gain_in), offset = contiguous(offset_in);
  const at::Tensor x = last_contiguous(x_in), weight = last_contiguous(weight_in);
  const at::Tensor residual = residual_in ? last_contiguous(*residual_in) : at::Tensor();
  at::Tensor out = at::empty({x.size(0), kept}, x.options());
  run(inner_kernels(),
      {x.const_data_ptr<float>(), weight.const_data_ptr<float>(), data(bias),
       residual.defined() ? residual.const_data_ptr<float>() : nullptr, data(gain), data(offset), x.size(0), x.size(1),
       weight.size(0), kept, x.stride(0), weight.stride(0), residual.defined() ? residual.stride(0) : 0,
       gated ? Activation::kSwiglu : activation == "gelu" ? Activation::kGelu : Activation::kNone,
       static_cast<float>(epsilon), out.data_ptr<float>()});
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(diffscore_fast, CPU, m) {
  m.impl("linear", linear);
}

}  // namespace diffscore
