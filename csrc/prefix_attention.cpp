// Attention of packed windows over a shared prefix and over themselves, online softmax in two ordered stages.
//
// A lane is a query. Stage one takes the queries of all windows that see one prefix, 24 at a time, over tiles of 64
// prefix keys and leaves (maximum, sum, accumulator) for each query; stage two goes on over the window's own keys from
// that state, which is the merge by log-sum-exp without a second softmax. Scores exist as a [64, 24] tile only, with
// keys down and queries across, so that maximum and sum need no work across a vector.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "convert.h"
#include "inner.h"
#include "parallel.h"

namespace diffscore {
namespace {

constexpr int64_t kTileKeys = 64;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Rows of a [N, heads, width] tensor, float32, with the last dimension contiguous.
struct Heads {
  const float* data;
  int64_t row_stride, head_stride;

  explicit Heads(const at::Tensor& t)
      : data(t.const_data_ptr<float>()), row_stride(t.stride(0)), head_stride(t.stride(1)) {}
  const float* at(int64_t row, int64_t head) const { return data + row * row_stride + head * head_stride; }
};

struct Layout {
  const int64_t *key_offsets, *query_offsets, *prefix_starts, *prefix_lengths;
  const int64_t* query_places;  // null: every key row has its query
  int64_t windows, block;
};

// Up to kLanes queries, named by their rows, that see the same prefix.
struct PrefixPanel {
  const int64_t* rows;
  int64_t count, start, length;
};

struct Problem {
  Heads query, key, value, prefix_key, prefix_value;
  Layout layout;
  int64_t heads, group, width;  // `group` query heads share a key-value head
  float scale;
  float* state;                 // [Q, heads, width]: accumulators after stage one, the result after stage two
  float *maximum, *sum;         // [Q, heads]
};

// The running softmax of one panel of queries.
struct Panel {
  explicit Panel(int64_t width)
      : query(width * kLanes), accumulator(width * kLanes), tile(kTileKeys * kLanes), maximum(kLanes), sum(kLanes),
        limits(kLanes) {}
  Scratch query, accumulator, tile, maximum, sum, limits;
};

void load_queries(const Problem& problem, const int64_t* rows, int64_t count, int64_t head, Panel& panel) {
  float* query = panel.query.get();
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    if (lane < count) {
      const float* from = problem.query.at(rows[lane], head);
      for (int64_t k = 0; k < problem.width; ++k) query[k * kLanes + lane] = from[k] * problem.scale;
    } else {
      for (int64_t k = 0; k < problem.width; ++k) query[k * kLanes + lane] = 0.0f;
    }
  }
}

void start_empty(const Problem& problem, Panel& panel) {
  std::fill_n(panel.maximum.get(), kLanes, -kInfinity);
  std::fill_n(panel.sum.get(), kLanes, 0.0f);
  std::fill_n(panel.accumulator.get(), problem.width * kLanes, 0.0f);
}

void load_state(const Problem& problem, const int64_t* rows, int64_t count, int64_t head, Panel& panel) {
  start_empty(problem, panel);
  for (int64_t lane = 0; lane < count; ++lane) {
    const int64_t at = rows[lane] * problem.heads + head;
    panel.maximum.get()[lane] = problem.maximum[at];
    panel.sum.get()[lane] = problem.sum[at];
    const float* from = problem.state + at * problem.width;
    for (int64_t k = 0; k < problem.width; ++k) panel.accumulator.get()[k * kLanes + lane] = from[k];
  }
}

void store_state(const Problem& problem, const int64_t* rows, int64_t count, int64_t head, const Panel& panel) {
  for (int64_t lane = 0; lane < count; ++lane) {
    const int64_t at = rows[lane] * problem.heads + head;
    problem.maximum[at] = panel.maximum.get()[lane];
    problem.sum[at] = panel.sum.get()[lane];
    float* to = problem.state + at * problem.width;
    for (int64_t k = 0; k < problem.width; ++k) to[k] = panel.accumulator.get()[k * kLanes + lane];
  }
}

void store_result(const Problem& problem, const int64_t* rows, int64_t count, int64_t head, const Panel& panel) {
  for (int64_t lane = 0; lane < count; ++lane) {
    float* to = problem.state + (rows[lane] * problem.heads + head) * problem.width;
    // A query that sees no key has sum 0 and accumulator 0; its result is 0, as the reference's.
    const float sum = panel.sum.get()[lane];
    const float share = sum == 0.0f ? 0.0f : 1.0f / sum;
    for (int64_t k = 0; k < problem.width; ++k) to[k] = panel.accumulator.get()[k * kLanes + lane] * share;
  }
}

void attend_to(const InnerKernels& inner, const Problem& problem, const Heads& key, const Heads& value, int64_t first,
               int64_t length, int64_t head, const float* limits, int vectors, Panel& panel) {
  const int64_t shared_head = head / problem.group;
  float* tile = panel.tile.get();
  for (int64_t at = 0; at < length; at += kTileKeys) {
    const int64_t keys = std::min(kTileKeys, length - at);
    inner.product(key.at(first + at, shared_head), key.row_stride, 1, keys, problem.width, panel.query.get(), tile,
                  false, vectors);
    inner.attend(tile, keys, static_cast<float>(at), limits, panel.maximum.get(), panel.sum.get(),
                 panel.accumulator.get(), problem.width, vectors);
    inner.product(value.at(first + at, shared_head), 1, value.row_stride, problem.width, keys, tile,
                  panel.accumulator.get(), true, vectors);
  }
}

void prefix_stage(const InnerKernels& inner, const Problem& problem, const std::vector<PrefixPanel>& panels) {
  const int64_t count = static_cast<int64_t>(panels.size());
  // Panels vary fastest: a thread stays with one head's keys and values, which then stay in its cache.
  share_units(count * problem.heads, [&](const auto& claim) {
    Panel panel(problem.width);
    for (int64_t unit; claim(unit);) {
      const PrefixPanel& own = panels[unit % count];
      const int64_t head = unit / count;
      load_queries(problem, own.rows, own.count, head, panel);
      start_empty(problem, panel);
      attend_to(inner, problem, problem.prefix_key, problem.prefix_value, own.start, own.length, head, nullptr,
                vectors_for(own.count), panel);
      store_state(problem, own.rows, own.count, head, panel);
    }
  });
}

void window_stage(const InnerKernels& inner, const Problem& problem) {
  const Layout& layout = problem.layout;
  share_units(layout.windows, [&](const auto& claim) {
    Panel panel(problem.width);
    int64_t rows[kLanes];
    for (int64_t window; claim(window);) {
      const int64_t first_key = layout.key_offsets[window], keys = layout.key_offsets[window + 1] - first_key;
      const int64_t end = layout.query_offsets[window + 1];
      for (int64_t head = 0; head < problem.heads; ++head) {
        for (int64_t first = layout.query_offsets[window]; first < end; first += kLanes) {
          const int64_t count = std::min(kLanes, end - first);
          for (int64_t lane = 0; lane < count; ++lane) rows[lane] = first + lane;
          load_queries(problem, rows, count, head, panel);
          if (layout.prefix_lengths[window] > 0) {
            load_state(problem, rows, count, head, panel);
          } else {
            start_empty(problem, panel);
          }
          if (layout.block > 0) {
            for (int64_t lane = 0; lane < kLanes; ++lane) {
              const int64_t row = first + std::min(lane, count - 1);
              const int64_t place =
                  layout.query_places ? layout.query_places[row] : row - layout.query_offsets[window];
              panel.limits.get()[lane] = static_cast<float>((place / layout.block + 1) * layout.block);
            }
          }
          attend_to(inner, problem, problem.key, problem.value, first_key, keys, head,
                    layout.block > 0 ? panel.limits.get() : nullptr, vectors_for(count), panel);
          store_result(problem, rows, count, head, panel);
        }
      }
    }
  });
}

// Panels of stage one. `rows` keeps the query rows, group after group, that the panels point into.
std::vector<PrefixPanel> prefix_panels(const Layout& layout, std::vector<int64_t>& rows) {
  std::map<std::pair<int64_t, int64_t>, std::vector<int64_t>> windows_of;
  for (int64_t window = 0; window < layout.windows; ++window) {
    if (layout.prefix_lengths[window] > 0)
      windows_of[{layout.prefix_starts[window], layout.prefix_lengths[window]}].push_back(window);
  }
  rows.reserve(layout.query_offsets[layout.windows] + 1);  // panels keep pointers: it must not grow
  std::vector<PrefixPanel> panels;
  for (const auto& [prefix, windows] : windows_of) {
    const int64_t begin = static_cast<int64_t>(rows.size());
    for (const int64_t window : windows) {
      for (int64_t row = layout.query_offsets[window]; row < layout.query_offsets[window + 1]; ++row)
        rows.push_back(row);
    }
    const int64_t end = static_cast<int64_t>(rows.size());
    for (int64_t at = begin; at < end; at += kLanes)
      panels.push_back({rows.data() + at, std::min(kLanes, end - at), prefix.first, prefix.second});
  }
  return panels;
}

void check_offsets(const at::Tensor& offsets, int64_t windows, int64_t rows, const char* name) {
  TORCH_CHECK(offsets.scalar_type() == at::kLong && offsets.dim() == 1 && offsets.size(0) == windows + 1,
              "prefix_attention: ", name, " must be [", windows + 1, "] int64; got ", offsets.sizes());
  const int64_t* at = offsets.const_data_ptr<int64_t>();
  for (int64_t w = 0; w < windows; ++w)
    TORCH_CHECK(at[w] <= at[w + 1], "prefix_attention: ", name, " falls at window ", w);
  TORCH_CHECK(at[0] == 0 && at[windows] == rows, "prefix_attention: ", name, " must run from 0 to ", rows, "; got ",
              at[0], " to ", at[windows]);
}

void check(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& prefix_key,
           const at::Tensor& prefix_value, const at::Tensor& key_offsets, const at::Tensor& query_offsets,
           const at::Tensor& prefix_starts, const at::Tensor& prefix_lengths,
           const std::optional<at::Tensor>& query_places) {
  TORCH_CHECK(query.dim() == 3, "prefix_attention: query must be [Q, H, d]; got ", query.sizes());
  for (const at::Tensor& t : {key, value, prefix_key, prefix_value}) {
    TORCH_CHECK(t.dim() == 3 && t.size(2) == query.size(2) && t.size(1) == key.size(1) && t.size(1) > 0 &&
                    query.size(1) % t.size(1) == 0,
                "prefix_attention: keys and values must be [rows, Hkv, ", query.size(2), "] with Hkv a divisor of ",
                query.size(1), "; got ", t.sizes());
    TORCH_CHECK(t.scalar_type() == query.scalar_type(), "prefix_attention: query is ", query.scalar_type(),
                ", a key or value ", t.scalar_type());
  }
  TORCH_CHECK(key.size(0) == value.size(0) && prefix_key.size(0) == prefix_value.size(0),
              "prefix_attention: keys and values differ in rows");
  const int64_t windows = prefix_starts.numel();
  check_offsets(key_offsets, windows, key.size(0), "key_offsets");
  check_offsets(query_offsets, windows, query.size(0), "query_offsets");
  TORCH_CHECK(prefix_lengths.numel() == windows && prefix_starts.scalar_type() == at::kLong &&
                  prefix_lengths.scalar_type() == at::kLong,
              "prefix_attention: prefix_starts and prefix_lengths must be [", windows, "] int64");
  for (int64_t w = 0; w < windows; ++w) {
    const int64_t start = prefix_starts.const_data_ptr<int64_t>()[w];
    const int64_t length = prefix_lengths.const_data_ptr<int64_t>()[w];
    TORCH_CHECK(length >= 0 && (length == 0 || (start >= 0 && start + length <= prefix_key.size(0))),
                "prefix_attention: window ", w, " sees prefix rows ", start, " .. ", start + length, " of ",
                prefix_key.size(0));
  }
  TORCH_CHECK(!query_places || (query_places->scalar_type() == at::kLong && query_places->numel() == query.size(0)),
              "prefix_attention: query_places must be [", query.size(0), "] int64");
}

at::Tensor prefix_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                            const at::Tensor& prefix_key, const at::Tensor& prefix_value, const at::Tensor& key_offsets,
                            const at::Tensor& query_offsets, const at::Tensor& prefix_starts,
                            const at::Tensor& prefix_lengths, const std::optional<at::Tensor>& query_places,
                            int64_t block) {
  check(query, key, value, prefix_key, prefix_value, key_offsets, query_offsets, prefix_starts, prefix_lengths,
        query_places);
  const auto prepare = [](const at::Tensor& t) { return last_contiguous(t.to(at::kFloat)); };
  const at::Tensor q = prepare(query), k = prepare(key), v = prepare(value);
  const at::Tensor pk = prepare(prefix_key), pv = prepare(prefix_value);
  const int64_t heads = q.size(1), width = q.size(2);
  at::Tensor out = at::empty({q.size(0), heads, width}, q.options());
  Scratch maximum(q.size(0) * heads), sum(q.size(0) * heads);
  const Layout layout{key_offsets.const_data_ptr<int64_t>(),    query_offsets.const_data_ptr<int64_t>(),
                      prefix_starts.const_data_ptr<int64_t>(),  prefix_lengths.const_data_ptr<int64_t>(),
                      query_places ? query_places->const_data_ptr<int64_t>() : nullptr,
                      prefix_starts.numel(), block};
  const Problem problem{Heads(q), Heads(k), Heads(v), Heads(pk), Heads(pv), layout, heads, heads / k.size(1), width,
                        1.0f / std::sqrt(static_cast<float>(width)), out.data_ptr<float>(), maximum.get(), sum.get()};
  std::vector<int64_t> rows;
  const std::vector<PrefixPanel> panels = prefix_panels(layout, rows);
  const InnerKernels& inner = inner_kernels();
  prefix_stage(inner, problem, panels);
  window_stage(inner, problem);
  return out.to(query.scalar_type());
}

}  // namespace

TORCH_LIBRARY_IMPL(diffscore_fast, CPU, m) {
  m.impl("prefix_attention", prefix_attention);
}

}  // namespace diffscore
