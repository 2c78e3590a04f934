// Reductions of log-values over segments, float64: log-mean-exp, and the bounds on log-evidence.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

#include "parallel.h"

namespace diffscore {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr int64_t kSegmentChunk = 1024;

// Runs work(segment) for every segment, in runs of neighbours.
template <class Work>
void for_each_segment(int64_t segments, const Work& work) {
  share_units((segments + kSegmentChunk - 1) / kSegmentChunk, [&](const auto& claim) {
    for (int64_t unit; claim(unit);) {
      const int64_t end = std::min(segments, (unit + 1) * kSegmentChunk);
      for (int64_t segment = unit * kSegmentChunk; segment < end; ++segment) work(segment);
    }
  });
}

double log_sum_exp(const double* values, int64_t count) {
  double maximum = -kInfinity;
  for (int64_t i = 0; i < count; ++i) maximum = values[i] > maximum ? values[i] : maximum;
  if (maximum == -kInfinity) {
    for (int64_t i = 0; i < count; ++i) {
      if (std::isnan(values[i])) return kNan;
    }
    return -kInfinity;  // -inf minus -inf would be NaN
  }
  double sum = 0.0;
  for (int64_t i = 0; i < count; ++i) sum += std::exp(values[i] - maximum);
  return maximum + std::log(sum);
}

void check(const char* name, const at::Tensor& values, const at::Tensor& segments) {
  TORCH_CHECK(values.dim() == 1 && values.scalar_type() == at::kDouble && values.is_contiguous(), name,
              ": values must be [N] float64, contiguous; got ", values.sizes(), " ", values.scalar_type());
  TORCH_CHECK(segments.dim() == 1 && segments.numel() > 0 && segments.scalar_type() == at::kLong &&
                  segments.is_contiguous(),
              name, ": segments must be [S + 1] int64, contiguous; got ", segments.sizes());
  const int64_t* edge = segments.const_data_ptr<int64_t>();
  const int64_t last = segments.numel() - 1;
  for (int64_t s = 0; s < last; ++s) TORCH_CHECK(edge[s] <= edge[s + 1], name, ": segments fall at ", s);
  TORCH_CHECK(edge[0] == 0 && edge[last] == values.numel(), name, ": segments must run from 0 to ", values.numel());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> log_mean_exp(const at::Tensor& values,
                                                                                    const at::Tensor& segments) {
  check("log_mean_exp", values, segments);
  const int64_t count = segments.numel() - 1;
  at::Tensor log_mean = at::empty({count}, values.options()), error = at::empty({count}, values.options());
  at::Tensor minimum = at::empty({count}, values.options()), maximum = at::empty({count}, values.options());
  at::Tensor counts = at::empty({count}, segments.options());
  const int64_t* edge = segments.const_data_ptr<int64_t>();
  const double* from = values.const_data_ptr<double>();
  double* means = log_mean.data_ptr<double>();
  double* errors = error.data_ptr<double>();
  double* lowest = minimum.data_ptr<double>();
  double* highest = maximum.data_ptr<double>();
  int64_t* sizes = counts.data_ptr<int64_t>();
  for_each_segment(count, [&](int64_t s) {
    const double* own = from + edge[s];
    const int64_t n = edge[s + 1] - edge[s];
    sizes[s] = n;
    lowest[s] = kInfinity;
    highest[s] = -kInfinity;
    for (int64_t i = 0; i < n; ++i) {  // a NaN is both extremes
      lowest[s] = own[i] < lowest[s] || std::isnan(own[i]) ? own[i] : lowest[s];
      highest[s] = own[i] > highest[s] || std::isnan(own[i]) ? own[i] : highest[s];
    }
    means[s] = n == 0 ? kNan : log_sum_exp(own, n) - std::log(static_cast<double>(n));
    // exp(value) / mean, less 1: relative, so that nothing overflows.
    double squares = 0.0;
    for (int64_t i = 0; i < n; ++i) squares += std::pow(std::expm1(own[i] - means[s]), 2);
    errors[s] = n < 2 || highest[s] == -kInfinity ? kNan : std::sqrt(squares / (n - 1) / n);
  });
  return {log_mean, error, minimum, maximum, counts};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> evidence_bounds(const at::Tensor& log_p, int64_t folds,
                                                               const at::Tensor& segments) {
  check("evidence_bounds", log_p, segments);
  TORCH_CHECK(folds >= 2, "evidence_bounds: folds must be at least 2; got ", folds);
  const int64_t blocks = segments.numel() - 1;
  at::Tensor lower = at::empty({blocks}, log_p.options()), plain = at::empty({blocks}, log_p.options());
  at::Tensor upper = at::empty({blocks}, log_p.options());
  const int64_t* edge = segments.const_data_ptr<int64_t>();
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t n = edge[b + 1] - edge[b];
    TORCH_CHECK(n > 0 && n % folds == 0, "evidence_bounds: block ", b, " has ", n,
                " draws, not a positive multiple of ", folds);
  }
  const double* from = log_p.const_data_ptr<double>();
  double* lowers = lower.data_ptr<double>();
  double* plains = plain.data_ptr<double>();
  double* uppers = upper.data_ptr<double>();
  for_each_segment(blocks, [&](int64_t b) {
    const int64_t n = edge[b + 1] - edge[b], each = n / folds;
    // Fold sums, and sums of the folds before and after each. To subtract a fold from the total instead would cancel
    // the others' digits where that fold dominates.
    std::vector<double> sums(folds), before(folds + 1, -kInfinity), after(folds + 1, -kInfinity);
    for (int64_t f = 0; f < folds; ++f) sums[f] = log_sum_exp(from + edge[b] + f * each, each);
    const auto add = [](double x, double y) {
      const double both[2] = {x, y};
      return log_sum_exp(both, 2);
    };
    for (int64_t f = 0; f < folds; ++f) before[f + 1] = add(before[f], sums[f]);
    for (int64_t f = folds; f-- > 0;) after[f] = add(after[f + 1], sums[f]);
    lowers[b] = before[folds] - std::log(static_cast<double>(n));
    double total = 0.0;
    for (int64_t f = 0; f < folds; ++f) {
      const double log_psi = add(before[f], after[f + 1]) - std::log(static_cast<double>(each * (folds - 1)));
      const double log_hat = sums[f] - std::log(static_cast<double>(each));
      const double tangent = log_psi == -kInfinity ? kInfinity : log_psi + std::exp(log_hat - log_psi) - 1.0;
      if (f == 0) plains[b] = tangent;
      total += tangent;
    }
    uppers[b] = total / folds;
  });
  return {lower, plain, upper};
}

}  // namespace

TORCH_LIBRARY_IMPL(diffscore_fast, CPU, m) {
  m.impl("log_mean_exp", log_mean_exp);
  m.impl("evidence_bounds", evidence_bounds);
}

}  // namespace diffscore
