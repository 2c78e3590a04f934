// Attention of packed windows over a shared prefix and over themselves, online softmax in two ordered stages.
//
// A lane is a query. Stage one takes the queries of all windows that see one prefix, 24 at a time, over tiles of 128
// prefix keys and leaves (maximum, sum, accumulator) for each query; stage two goes on over the window's own keys from
// that state, which is the merge by log-sum-exp without a second softmax. Scores exist as a [128, 24] tile only, with
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

constexpr int64_t kTileKeys = 128;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

constexpr int64_t kPanelsAtOnce = 32;  // panels of one prefix that a unit of work takes
constexpr int64_t kWindowPanels = 8;   // panels of one window; a long window is shared among threads

// Rows of a [N, heads, width] tensor in float32, bfloat16 or float16, with the last dimension contiguous.
struct Heads {
  const char* data;
  at::ScalarType type;
  int64_t row_bytes, head_bytes;

  explicit Heads(const at::Tensor& t)
      : data(static_cast<const char*>(t.const_data_ptr())), type(t.scalar_type()),
        row_bytes(t.stride(0) * t.element_size()), head_bytes(t.stride(1) * t.element_size()) {}
  const char* at(int64_t row, int64_t head) const { return data + row * row_bytes + head * head_bytes; }
  const float* floats(int64_t row, int64_t head) const { return reinterpret_cast<const float*>(at(row, head)); }
};

struct Layout {
  const int64_t *key_offsets, *query_offsets, *prefix_starts, *prefix_lengths;
  const int64_t* query_places;  // null: every key row has its query
  int64_t windows, block;
};

// Query rows that see the same prefix, in panels that one unit of work takes together.
struct PrefixUnit {
  const int64_t* rows;
  int64_t count, start, length;
};

// Query rows first .. last of one window.
struct WindowUnit {
  int64_t window, first, last;
};

struct Problem {
  Heads query;  // float32
  Heads key, value, prefix_key, prefix_value;
  Layout layout;
  int64_t heads, group, width;  // `group` query heads share a key-value head
  float scale;
  float* state;                 // [Q, heads, width]: accumulators after stage one, the result after stage two
  float *maximum, *sum;         // [Q, heads]
};

// Keys and values of one head, copied side by side in float32. Rows of many heads lie a power of two times a small
// number apart, so that a strided walk would meet few cache sets.
class HeadCopy {
 public:
  void fill(const Problem& problem, const Heads& key, const Heads& value, int64_t first, int64_t rows, int64_t head) {
    keys_.resize(rows * problem.width);
    values_.resize(rows * problem.width);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t from = first + row, shared = head / problem.group, to = row * problem.width;
      to_floats(key.type, key.at(from, shared), problem.width, keys_.data() + to);
      to_floats(value.type, value.at(from, shared), problem.width, values_.data() + to);
    }
    width_ = problem.width;
  }
  const float* key(int64_t row) const { return keys_.data() + row * width_; }
  const float* value(int64_t row) const { return values_.data() + row * width_; }

 private:
  std::vector<float> keys_, values_;
  int64_t width_ = 0;
};

// The running softmax of up to kLanes queries of one head.
class Panel {
 public:
  Panel(const InnerKernels& inner, const Problem& problem)
      : inner_(inner), problem_(problem), query_(problem.width * kLanes), accumulator_(problem.width * kLanes),
        tile_(kTileKeys * kLanes), maximum_(kLanes), sum_(kLanes), limits_(kLanes), spare_(problem.width) {
    std::fill_n(spare_.get(), problem.width, 0.0f);
  }

  // Takes queries rows[0] .. rows[count - 1], which have seen nothing.
  void start(const int64_t* rows, int64_t count, int64_t head) {
    rows_ = rows;
    count_ = count;
    head_ = head;
    vectors_ = vectors_for(count);
    const float* from[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane)
      from[lane] = lane < count ? problem_.query.floats(rows[lane], head) : spare_.get();
    inner_.gather(from, problem_.width, problem_.scale, query_.get(), vectors_);
    std::fill_n(maximum_.get(), kLanes, -kInfinity);
    std::fill_n(sum_.get(), kLanes, 0.0f);
    std::fill_n(accumulator_.get(), problem_.width * kLanes, 0.0f);
  }

  // Asks for queries that the next panel will take: their rows lie too far apart for the processor to foresee them.
  void prefetch(const int64_t* rows, int64_t count, int64_t head) const {
    constexpr int64_t line = 64 / sizeof(float);
    for (int64_t lane = 0; lane < count; ++lane) {
      for (int64_t k = 0; k < problem_.width; k += line) __builtin_prefetch(problem_.query.floats(rows[lane], head) + k);
    }
  }

  // Goes on from what `store_state` left.
  void load_state() {
    const float* from[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      from[lane] = lane < count_ ? problem_.state + place(lane) * problem_.width : spare_.get();
      if (lane < count_) {
        maximum_.get()[lane] = problem_.maximum[place(lane)];
        sum_.get()[lane] = problem_.sum[place(lane)];
      }
    }
    inner_.gather(from, problem_.width, 1.0f, accumulator_.get(), vectors_);
  }

  // Block-causal: a query at place p sees its window's keys below (p // block + 1) * block.
  void limit_to_blocks(const Layout& layout, int64_t first_row_of_window) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const int64_t row = rows_[std::min(lane, count_ - 1)];
      const int64_t at = layout.query_places ? layout.query_places[row] : row - first_row_of_window;
      limits_.get()[lane] = static_cast<float>((at / layout.block + 1) * layout.block);
    }
  }

  void attend(const HeadCopy& copy, int64_t length, bool limited) {
    for (int64_t at = 0; at < length; at += kTileKeys) {
      const int64_t keys = std::min(kTileKeys, length - at), width = problem_.width;
      inner_.product(copy.key(at), width, 1, keys, width, query_.get(), tile_.get(), false, vectors_);
      inner_.attend(tile_.get(), keys, static_cast<float>(at), limited ? limits_.get() : nullptr, maximum_.get(),
                    sum_.get(), accumulator_.get(), width, vectors_);
      inner_.product(copy.value(at), 1, width, width, keys, tile_.get(), accumulator_.get(), true, vectors_);
    }
  }

  void store_state() {
    for (int64_t lane = 0; lane < count_; ++lane) {
      problem_.maximum[place(lane)] = maximum_.get()[lane];
      problem_.sum[place(lane)] = sum_.get()[lane];
    }
    store(nullptr);
  }

  // A query that has seen no key has sum 0 and accumulator 0; its result is 0, as the reference's.
  void store_result() {
    for (int64_t lane = 0; lane < kLanes; ++lane)
      sum_.get()[lane] = sum_.get()[lane] == 0.0f ? 0.0f : 1.0f / sum_.get()[lane];
    store(sum_.get());
  }

 private:
  int64_t place(int64_t lane) const { return rows_[lane] * problem_.heads + head_; }

  void store(const float* scales) {
    float* to[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane)
      to[lane] = lane < count_ ? problem_.state + place(lane) * problem_.width : spare_.get();
    inner_.scatter(accumulator_.get(), problem_.width, scales, to, vectors_);
  }

  const InnerKernels& inner_;
  const Problem& problem_;
  Scratch query_, accumulator_, tile_, maximum_, sum_, limits_, spare_;
  const int64_t* rows_ = nullptr;
  int64_t count_ = 0, head_ = 0;
  int vectors_ = 0;
};

void prefix_stage(const InnerKernels& inner, const Problem& problem, const std::vector<PrefixUnit>& units) {
  const int64_t count = static_cast<int64_t>(units.size());
  share_units(count * problem.heads, [&](const auto& claim) {
    Panel panel(inner, problem);
    HeadCopy copy;
    for (int64_t index; claim(index);) {
      const PrefixUnit& unit = units[index / problem.heads];  // heads vary fastest: a unit's query rows stay in cache
      const int64_t head = index % problem.heads;
      copy.fill(problem, problem.prefix_key, problem.prefix_value, unit.start, unit.length, head);
      for (int64_t first = 0; first < unit.count; first += kLanes) {
        panel.start(unit.rows + first, std::min(kLanes, unit.count - first), head);
        panel.prefetch(unit.rows + first + kLanes, std::min(kLanes, unit.count - first - kLanes), head);
        panel.attend(copy, unit.length, false);
        panel.store_state();
      }
    }
  });
}

void window_stage(const InnerKernels& inner, const Problem& problem, const std::vector<WindowUnit>& units) {
  const Layout& layout = problem.layout;
  share_units(static_cast<int64_t>(units.size()) * problem.heads, [&](const auto& claim) {
    Panel panel(inner, problem);
    HeadCopy copy;
    int64_t rows[kLanes];
    for (int64_t index; claim(index);) {
      const auto [window, begin, end] = units[index / problem.heads];
      const int64_t head = index % problem.heads;
      const int64_t first_key = layout.key_offsets[window], keys = layout.key_offsets[window + 1] - first_key;
      copy.fill(problem, problem.key, problem.value, first_key, keys, head);
      for (int64_t first = begin; first < end; first += kLanes) {
        const int64_t count = std::min(kLanes, end - first);
        for (int64_t lane = 0; lane < count; ++lane) rows[lane] = first + lane;
        panel.start(rows, count, head);
        if (layout.prefix_lengths[window] > 0) panel.load_state();
        if (layout.block > 0) panel.limit_to_blocks(layout, layout.query_offsets[window]);
        panel.attend(copy, keys, layout.block > 0);
        panel.store_result();
      }
    }
  });
}

std::vector<WindowUnit> window_units(const Layout& layout) {
  std::vector<WindowUnit> units;
  for (int64_t window = 0; window < layout.windows; ++window) {
    const int64_t end = layout.query_offsets[window + 1], step = kWindowPanels * kLanes;
    for (int64_t first = layout.query_offsets[window]; first < end; first += step)
      units.push_back({window, first, std::min(first + step, end)});
  }
  return units;
}

// The work of stage one. `rows` keeps the query rows, prefix after prefix, that the units point into.
std::vector<PrefixUnit> prefix_units(const Layout& layout, std::vector<int64_t>& rows) {
  std::map<std::pair<int64_t, int64_t>, std::vector<int64_t>> windows_of;
  for (int64_t window = 0; window < layout.windows; ++window) {
    if (layout.prefix_lengths[window] > 0)
      windows_of[{layout.prefix_starts[window], layout.prefix_lengths[window]}].push_back(window);
  }
  rows.reserve(layout.query_offsets[layout.windows] + 1);  // units keep pointers: it must not grow
  std::vector<PrefixUnit> units;
  for (const auto& [prefix, windows] : windows_of) {
    const int64_t begin = static_cast<int64_t>(rows.size());
    for (const int64_t window : windows) {
      for (int64_t row = layout.query_offsets[window]; row < layout.query_offsets[window + 1]; ++row)
        rows.push_back(row);
    }
    const int64_t end = static_cast<int64_t>(rows.size()), step = kPanelsAtOnce * kLanes;
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
}

at::Tensor prefix_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                            const at::Tensor& prefix_key, const at::Tensor& prefix_value,
                            const at::Tensor& key_offsets_in, const at::Tensor& query_offsets_in,
                            const at::Tensor& prefix_starts_in, const at::Tensor& prefix_lengths_in,
                            const std::optional<at::Tensor>& query_places_in, int64_t block) {
  const at::Tensor key_offsets = key_offsets_in.contiguous(), query_offsets = query_offsets_in.contiguous();
  const at::Tensor prefix_starts = prefix_starts_in.contiguous(), prefix_lengths = prefix_lengths_in.contiguous();
  std::optional<at::Tensor> query_places;
  if (query_places_in) query_places = query_places_in->contiguous();
  check(query, key, value, prefix_key, prefix_value, key_offsets, query_offsets, prefix_starts, prefix_lengths,
        query_places);
  TORCH_CHECK(block >= 0, "prefix_attention: block must not be negative; got ", block);
  // Keys and values are converted as their heads are copied: the arena of prefixes holds many times what is seen.
  const at::Tensor q = last_contiguous(query.to(at::kFloat)), k = last_contiguous(key), v = last_contiguous(value);
  const at::Tensor pk = last_contiguous(prefix_key), pv = last_contiguous(prefix_value);
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
  const std::vector<PrefixUnit> units = prefix_units(layout, rows);
  const InnerKernels& inner = inner_kernels();
  prefix_stage(inner, problem, units);
  window_stage(inner, problem, window_units(layout));
  return out.to(query.scalar_type());
}

}  // namespace

TORCH_LIBRARY_IMPL(diffscore_fast, CPU, m) {
  m.impl("prefix_attention", prefix_attention);
}

}  // namespace diffscore
