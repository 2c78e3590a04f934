// Attention of packed windows over a shared prefix and over themselves, online softmax in two ordered stages.
//
// Stage one takes the queries of all windows that see one prefix over that prefix and leaves a running softmax (maximum,
// sum, accumulator) for each query. Stage two continues from it over the window's own keys, which is the merge by
// log-sum-exp without a second softmax. `attention_queries.h` has the running softmax of a panel or block of queries.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "attention_queries.h"
#include "brgemm.h"
#include "convert.h"
#include "inner.h"
#include "parallel.h"

namespace diffscore {
namespace {

constexpr int64_t kPrefixPanelChunk = 32;  // panels of one prefix that a unit of work takes
constexpr int64_t kWindowPanelChunk = 8;   // panels of one window; a long window is shared among threads

// Query rows that see the same prefix, in panels that one unit of work takes together.
struct PrefixUnit {
  const int64_t* rows;
  int64_t count, start, length;
};

// Query rows first .. last of one window.
struct WindowUnit {
  int64_t window, first, last;
};

void prefix_stage(const InnerKernels& inner, const Problem& problem, const std::vector<PrefixUnit>& units) {
  const int64_t count = static_cast<int64_t>(units.size()), lanes = problem.lanes();
  share_units(count * problem.heads, [&](const auto& claim) {
    const ProductScope scope(problem.products);
    Queries queries(inner, problem);
    HeadCopy copy(problem);
    for (int64_t index; claim(index);) {
      const PrefixUnit& unit = units[index / problem.heads];  // heads vary fastest: a unit's query rows stay in cache
      const int64_t head = index % problem.heads;
      copy.fill(problem.prefix_key, problem.prefix_value, unit.start, unit.length, head);
      for (int64_t first = 0; first < unit.count; first += lanes) {
        queries.start(unit.rows + first, std::min(lanes, unit.count - first), head);
        queries.prefetch(unit.rows + first + lanes, std::min(lanes, unit.count - first - lanes), head);
        queries.attend(copy, unit.length, false);
        queries.store_state();
      }
    }
  });
}

void window_stage(const InnerKernels& inner, const Problem& problem, const std::vector<WindowUnit>& units) {
  const Layout& layout = problem.layout;
  const int64_t lanes = problem.lanes();
  share_units(static_cast<int64_t>(units.size()) * problem.heads, [&](const auto& claim) {
    const ProductScope scope(problem.products);
    Queries queries(inner, problem);
    HeadCopy copy(problem);
    int64_t rows[kBlockLanes];
    for (int64_t index; claim(index);) {
      const auto [window, begin, end] = units[index / problem.heads];
      const int64_t head = index % problem.heads;
      const int64_t first_key = layout.key_offsets[window], keys = layout.key_offsets[window + 1] - first_key;
      copy.fill(problem.key, problem.value, first_key, keys, head);
      for (int64_t first = begin; first < end; first += lanes) {
        const int64_t count = std::min(lanes, end - first);
        for (int64_t lane = 0; lane < count; ++lane) rows[lane] = first + lane;
        queries.start(rows, count, head);
        if (layout.prefix_lengths[window] > 0) queries.load_state();
        if (layout.block > 0) queries.limit_to_blocks(layout, layout.query_offsets[window]);
        queries.attend(copy, keys, layout.block > 0);
        queries.store_result();
      }
    }
  });
}

std::vector<WindowUnit> window_units(const Layout& layout) {
  std::vector<WindowUnit> units;
  for (int64_t window = 0; window < layout.windows; ++window) {
    const int64_t end = layout.query_offsets[window + 1], step = kWindowPanelChunk * kLanes;
    for (int64_t first = layout.query_offsets[window]; first < end; first += step)
      units.push_back({window, first, std::min(first + step, end)});
  }
  return units;
}

// The work of stage one. The units point into `rows`, the query rows, prefix after prefix.
std::vector<PrefixUnit> prefix_units(const Layout& layout, std::vector<int64_t>& rows) {
  std::map<std::pair<int64_t, int64_t>, std::vector<int64_t>> windows_of;
  for (int64_t window = 0; window < layout.windows; ++window) {
    if (layout.prefix_lengths[window] > 0)
      windows_of[{layout.prefix_starts[window], layout.prefix_lengths[window]}].push_back(window);
  }
  rows.reserve(layout.query_offsets[layout.windows] + 1);  // the units keep pointers, so it must not be reallocated
  std::vector<PrefixUnit> units;
  for (const auto& [prefix, windows] : windows_of) {
    const int64_t begin = static_cast<int64_t>(rows.size());
    for (const int64_t window : windows) {
      for (int64_t row = layout.query_offsets[window]; row < layout.query_offsets[window + 1]; ++row)
        rows.push_back(row);
    }
    const int64_t end = static_cast<int64_t>(rows.size()), step = kPrefixPanelChunk * kLanes;
    for (int64_t at = begin; at < end; at += step)
      units.push_back({rows.data() + at, std::min(step, end - at), prefix.first, prefix.second});
  }
  return units;
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
  const at::ScalarType type = query.scalar_type();
  TORCH_CHECK(query.dim() == 3 && (type == at::kFloat || type == at::kBFloat16 || type == at::kHalf),
              "prefix_attention: query must be [Q, H, d] in float32, bfloat16 or float16; got ", query.sizes(), " ",
              type);
  TORCH_CHECK(query.size(2) > 0, "prefix_attention: head_dim must be at least 1; got query ", query.sizes());
  for (const at::Tensor& t : {query, key, value, prefix_key, prefix_value}) {
    if (t.dim() == 3) {
      check_bounds("prefix_attention", "query, key or value", t.size(0), t.size(1));
      check_bounds("prefix_attention", "a head", 0, t.size(2));
    }
  }
  for (const at::Tensor& t : {key, value, prefix_key, prefix_value}) {
    TORCH_CHECK(t.dim() == 3 && t.size(2) == query.size(2) && t.size(1) == key.size(1) && t.size(1) > 0 &&
                    query.size(1) % t.size(1) == 0,
                "prefix_attention: keys and values must be [rows, Hkv, ", query.size(2), "] with Hkv a divisor of ",
                query.size(1), "; got ", t.sizes());
    TORCH_CHECK(t.scalar_type() == type, "prefix_attention: query is ", type, ", a key or value ", t.scalar_type());
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
    // Not start + length, which may pass 2^63.
    TORCH_CHECK(length >= 0 && (length == 0 || (start >= 0 && length <= prefix_key.size(0) - start)),
                "prefix_attention: window ", w, " sees ", length, " prefix rows from ", start, " of ",
                prefix_key.size(0));
  }
  TORCH_CHECK(!query_places || (query_places->scalar_type() == at::kLong && query_places->numel() == query.size(0)),
              "prefix_attention: query_places must be [", query.size(0), "] int64");
  if (!query_places) return;
  const int64_t* places = query_places->const_data_ptr<int64_t>();
  const int64_t *keys = key_offsets.const_data_ptr<int64_t>(), *queries = query_offsets.const_data_ptr<int64_t>();
  for (int64_t w = 0; w < windows; ++w) {
    const int64_t length = keys[w + 1] - keys[w];
    for (int64_t row = queries[w]; row < queries[w + 1]; ++row)
      TORCH_CHECK(places[row] >= 0 && places[row] < length, "prefix_attention: query_places[", row, "] is ",
                  places[row], ", outside window ", w, " of ", length, " rows");
  }
}

at::Tensor prefix_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                            const at::Tensor& prefix_key, const at::Tensor& prefix_value,
                            const at::Tensor& key_offsets_in, const at::Tensor& query_offsets_in,
                            const at::Tensor& prefix_starts_in, const at::Tensor& prefix_lengths_in,
                            const std::optional<at::Tensor>& query_places_in, int64_t block,
                            std::string_view products_asked) {
  const at::Tensor key_offsets = key_offsets_in.contiguous(), query_offsets = query_offsets_in.contiguous();
  const at::Tensor prefix_starts = prefix_starts_in.contiguous(), prefix_lengths = prefix_lengths_in.contiguous();
  std::optional<at::Tensor> query_places;
  if (query_places_in) query_places = query_places_in->contiguous();
  check(query, key, value, prefix_key, prefix_value, key_offsets, query_offsets, prefix_starts, prefix_lengths,
        query_places);
  TORCH_CHECK(block >= 0, "prefix_attention: block must not be negative; got ", block);
  // Keys and values are converted head by head, as they are copied: most rows of the prefix cache are not seen.
  const at::ScalarType type = query.scalar_type();
  const Products products = choose_products("prefix_attention", products_asked, type,
                                            type == at::kHalf ? "the inputs are float16" : "");
  const at::Tensor q = last_contiguous(products.in_blocks() ? query : query.to(at::kFloat));
  const at::Tensor k = last_contiguous(key), v = last_contiguous(value);
  const at::Tensor pk = last_contiguous(prefix_key), pv = last_contiguous(prefix_value);
  const int64_t heads = q.size(1), head_dim = q.size(2);
  at::Tensor out = at::empty({q.size(0), heads, head_dim}, q.options().dtype(at::kFloat));
  Scratch maximum(q.size(0) * heads), sum(q.size(0) * heads);
  const Layout layout{key_offsets.const_data_ptr<int64_t>(),    query_offsets.const_data_ptr<int64_t>(),
                      prefix_starts.const_data_ptr<int64_t>(),  prefix_lengths.const_data_ptr<int64_t>(),
                      query_places ? query_places->const_data_ptr<int64_t>() : nullptr,
                      prefix_starts.numel(), block};
  const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
  const Problem problem{Heads(q), Heads(k), Heads(v), Heads(pk), Heads(pv), layout, heads, heads / k.size(1), head_dim,
                        scale, products, out.data_ptr<float>(), maximum.get(), sum.get()};
  std::vector<int64_t> rows;
  const std::vector<PrefixUnit> units = prefix_units(layout, rows);
  const InnerKernels& inner = inner_kernels();
  prefix_stage(inner, problem, units);
  window_stage(inner, problem, window_units(layout));
  return out.to(type);
}

}  // namespace

TORCH_LIBRARY_IMPL(diffscore_fast, CPU, m) {
  m.impl("prefix_attention", prefix_attention);
}

}  // namespace diffscore
