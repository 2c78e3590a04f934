// Log-softmax of the vocabulary projection at the target, with an int8 weight for the log-sum-exp.
//
// The target's own logit is a product in float32, and stands for the target inside the log-sum-exp as well, so that no
// log-prob exceeds 0. Blocks of hidden states meet the vocabulary panel by panel; an online softmax absorbs the logits
// while they are in cache. Splits of the vocabulary, whose number depends on its size only, are merged in order.
#include "int8_rows.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <string_view>

namespace diffscore {
namespace {

constexpr int64_t kSplitPanels = 64;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

at::Tensor logprob(const at::Tensor& hidden_in, const at::Tensor& packed, const at::Tensor& sums, const at::Tensor& scale,
                   const std::optional<at::Tensor>& bias, const at::Tensor& weight_in, const at::Tensor& targets_in,
                   at::IntArrayRef excluded, double logit_scale, std::string_view loops) {
  const int64_t vocabulary = scale.numel();
  check_rows("int8_logprob", hidden_in);
  check_packed("int8_logprob", hidden_in.size(1), packed, sums, scale, 1);
  TORCH_CHECK(vocabulary > 0, "int8_logprob: the vocabulary is empty");
  TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == vocabulary && bias->scalar_type() == at::kFloat),
              "int8_logprob: bias must be [", vocabulary, "] float32");
  TORCH_CHECK(weight_in.dim() == 2 && weight_in.size(0) >= vocabulary && weight_in.size(1) == hidden_in.size(1) &&
                  weight_in.scalar_type() == at::kFloat,
              "int8_logprob: weight must be [", vocabulary, ", ", hidden_in.size(1), "] float32; got ",
              weight_in.sizes(), " ", weight_in.scalar_type());
  TORCH_CHECK(targets_in.dim() == 1 && targets_in.size(0) == hidden_in.size(0) && targets_in.scalar_type() == at::kLong,
              "int8_logprob: targets must be [", hidden_in.size(0), "] int64");
  TORCH_CHECK(logit_scale > 0, "int8_logprob: logit_scale must be above 0; got ", logit_scale);
  const at::Tensor hidden = last_contiguous(hidden_in), weight = last_contiguous(weight_in);
  const at::Tensor targets = targets_in.contiguous(), offset = bias ? bias->contiguous() : at::Tensor();
  const int64_t* target = targets.const_data_ptr<int64_t>();
  const int64_t rows = hidden.size(0), depth = hidden.size(1);
  for (int64_t row = 0; row < rows; ++row)
    TORCH_CHECK_INDEX(target[row] >= 0 && target[row] < vocabulary, "int8_logprob: target ", target[row],
                      " is outside the vocabulary of ", vocabulary);
  const Int8Kernels& inner = int8_kernels_named(loops);
  const Int8Weight codes(inner, packed, sums, scale, bias, 1);
  const auto factor = static_cast<float>(logit_scale);
  std::vector<char> left_out(codes.panels * kPanel, 0);
  std::fill(left_out.begin() + vocabulary, left_out.end(), 1);
  for (const int64_t id : excluded) {
    if (id >= 0 && id < vocabulary) left_out[id] = 1;
  }
  const int64_t splits = (codes.panels + kSplitPanels - 1) / kSplitPanels, lanes = rows * kSoftmaxLanes;
  Scratch maximum(splits * lanes), sum(splits * lanes);
  const int64_t block = kBlockRows8, blocks = (rows + block - 1) / block;
  share_units(splits * blocks, [&](const auto& claim) {
    QuantisedRows own(block, depth);
    Scratch sums_of(block * kPanel), tile(block * kPanel);
    for (int64_t unit; claim(unit);) {
      const int64_t split = unit % splits, first = unit / splits * block, count = std::min(block, rows - first);
      float* most = maximum.get() + split * lanes + first * kSoftmaxLanes;
      float* all = sum.get() + split * lanes + first * kSoftmaxLanes;
      std::fill_n(most, count * kSoftmaxLanes, -kInfinity);
      std::fill_n(all, count * kSoftmaxLanes, 0.0f);
      own.read(inner, hidden.const_data_ptr<float>() + first * hidden.stride(0), hidden.stride(0), count);
      const int64_t end = std::min((split + 1) * kSplitPanels, codes.panels);
      for (int64_t panel = split * kSplitPanels; panel < end; ++panel) {
        codes.product(panel, own, sums_of.get(), tile.get());
        const int64_t begin = panel * kPanel;
        for (int64_t c = 0; c < kPanel; ++c) {
          for (int64_t r = 0; left_out[begin + c] && r < count; ++r) tile.get()[r * kPanel + c] = -kInfinity;
        }
        for (int64_t r = 0; r < count; ++r) {
          const int64_t place = target[first + r] - begin;
          if (place >= 0 && place < kPanel) tile.get()[r * kPanel + place] = -kInfinity;
        }
        inner.absorb(tile.get(), count, factor, most, all);
      }
    }
  });
  at::Tensor out = at::empty({rows}, hidden.options());
  for (int64_t row = 0; row < rows; ++row) {
    float gold = inner.dot(hidden.const_data_ptr<float>() + row * hidden.stride(0),
                           weight.const_data_ptr<float>() + target[row] * weight.stride(0), depth);
    gold = (gold + (bias ? offset.const_data_ptr<float>()[target[row]] : 0.0f)) * factor;
    if (left_out[target[row]] && gold == gold) gold = -kInfinity;
    float most = gold;
    bool undefined = std::isnan(gold);
    for (int64_t split = 0; split < splits; ++split) {
      for (int64_t lane = 0; lane < kSoftmaxLanes; ++lane) {
        const int64_t at = split * lanes + row * kSoftmaxLanes + lane;
        most = std::max(most, maximum.get()[at]);
        undefined |= std::isnan(sum.get()[at]);
      }
    }
    double total = gold == -kInfinity ? 0.0 : std::exp(double(gold) - most);
    for (int64_t split = 0; split < splits; ++split) {
      for (int64_t lane = 0; lane < kSoftmaxLanes; ++lane) {
        const int64_t at = split * lanes + row * kSoftmaxLanes + lane;
        if (maximum.get()[at] > -kInfinity) total += sum.get()[at] * std::exp(double(maximum.get()[at]) - most);
      }
    }
    const double value = undefined            ? std::numeric_limits<double>::quiet_NaN()
                         : gold == -kInfinity ? -std::numeric_limits<double>::infinity()
                                              : double(gold) - most - std::log(total);
    out.data_ptr<float>()[row] = static_cast<float>(value);
  }
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(diffscore_fast, m) {
  m.def(
      "int8_logprob(Tensor hidden, Tensor packed, Tensor sums, Tensor scale, Tensor? bias, Tensor weight, Tensor targets, "
      "int[] excluded_ids, float logit_scale, str loops) -> Tensor");
}

TORCH_LIBRARY_IMPL(diffscore_fast, CPU, m) {
  m.impl("int8_logprob", logprob);
}

}  // namespace diffscore
