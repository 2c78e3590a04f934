// Attention of packed windows over a shared prefix and over themselves, online softmax in two ordered stages.
//
// A lane is a query. Stage one takes the queries of all windows that see one prefix, a panel of 24 at a time, or, with
// products in blocks, a block of 48, over tiles of 128 prefix keys, and leaves (maximum, sum, accumulator) for each
// query; stage two goes on over the window's own keys from that state, which is the merge by log-sum-exp without a
// second softmax. Scores exist as a tile of 128 keys only, with keys down and queries across, so that maximum and sum
// need no work across a vector. In bfloat16 blocks the softmax's weights are rounded to bfloat16 before they meet the
// values, as matrix units want them; their sum is of the weights before.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "brgemm.h"
#include "convert.h"
#include "inner.h"
#include "parallel.h"

namespace diffscore {
namespace {

constexpr int64_t kTileKeys = 128;
constexpr int64_t kRowStep = 16;  // what an accumulator's rows are padded to in blocks: the rows of an AMX tile
constexpr float kInfinity = std::numeric_limits<float>::infinity();

constexpr int64_t kPanelsAtOnce = 32;  // panels of one prefix that a unit of work takes
constexpr int64_t kWindowPanels = 8;   // panels of one window; a long window is shared among threads

constexpr int64_t round_up(int64_t count, int64_t step) {
  return (count + step - 1) / step * step;
}

// Rows of a [N, heads, width] tensor in float32, bfloat16 or float16, with the last dimension contiguous.
struct Heads {
  const char* data;
  at::ScalarType type;
  int64_t number_bytes, row_bytes, head_bytes;

  explicit Heads(const at::Tensor& t)
      : data(static_cast<const char*>(t.const_data_ptr())), type(t.scalar_type()), number_bytes(t.element_size()),
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
  Heads query;  // float32, or the products' type
  Heads key, value, prefix_key, prefix_value;
  Layout layout;
  int64_t heads, group, width;  // `group` query heads share a key-value head
  float scale;
  Products products;
  float* state;                 // [Q, heads, width]: accumulators after stage one, the result after stage two
  float *maximum, *sum;         // [Q, heads]

  int64_t lanes() const { return products.in_blocks() ? kBlockLanes : kLanes; }
  // In blocks a head's numbers and an accumulator's rows are padded with zeros to these.
  int64_t depth() const { return products.in_blocks() ? round_up(width, kDepthStep) : width; }
  int64_t accumulator_rows() const { return products.in_blocks() ? round_up(width, kRowStep) : width; }
};

// Bytes aligned to a cache line, which rows of whole tiles then never straddle.
class Bytes {
 public:
  // Room for `size`, whose content is lost.
  void hold(int64_t size) {
    if (size > room_) {
      numbers_.emplace(round_up(size, kWord) / kWord);
      room_ = size;
    }
    size_ = size;
  }
  void clear() {
    if (size_ > 0) std::memset(data(), 0, size_);
  }
  char* data() { return numbers_ ? reinterpret_cast<char*>(numbers_->get()) : nullptr; }
  const char* data() const { return numbers_ ? reinterpret_cast<const char*>(numbers_->get()) : nullptr; }

 private:
  std::optional<Scratch> numbers_;
  int64_t room_ = 0, size_ = 0;
};

// Keys and values of one head, copied side by side: rows of many heads lie a power of two times a small number apart,
// so that a strided walk would meet few cache sets. In float32, [rows, width] each; for blocks in the products' type,
// whole blocks of keys [rows, depth], and each tile's values transposed, [accumulator_rows, kTileKeys], padded with 0.
class HeadCopy {
 public:
  explicit HeadCopy(const Problem& problem) : problem_(problem) {}

  void fill(const Heads& key, const Heads& value, int64_t first, int64_t rows, int64_t head) {
    const int64_t shared = head / problem_.group;
    if (!problem_.products.in_blocks()) return fill_rows(key, value, first, rows, shared);
    keys_.hold(round_up(rows, kBlockRows) * key_bytes());
    values_.hold(round_up(rows, kTileKeys) * problem_.accumulator_rows() * problem_.products.number_size());
    keys_.clear();
    values_.clear();
    for (int64_t row = 0; row < rows; ++row)
      std::memcpy(keys_.data() + row * key_bytes(), key.at(first + row, shared),
                  problem_.width * problem_.products.number_size());
    if (problem_.products.number_size() == 2) {
      transpose_values<uint16_t>(value, first, rows, shared);
    } else {
      transpose_values<float>(value, first, rows, shared);
    }
  }

  // From key `row` on.
  const char* keys(int64_t row) const { return keys_.data() + row * key_bytes(); }
  // From value `row` on; for blocks it is the first of a tile.
  const char* values(int64_t row) const {
    const int64_t numbers = problem_.products.in_blocks() ? problem_.accumulator_rows() : problem_.width;
    return values_.data() + row * numbers * problem_.products.number_size();
  }

 private:
  int64_t key_bytes() const { return problem_.depth() * problem_.products.number_size(); }

  void fill_rows(const Heads& key, const Heads& value, int64_t first, int64_t rows, int64_t shared) {
    keys_.hold(rows * key_bytes());
    values_.hold(rows * key_bytes());
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t from = first + row, to = row * key_bytes();
      to_floats(key.type, key.at(from, shared), problem_.width, reinterpret_cast<float*>(keys_.data() + to));
      to_floats(value.type, value.at(from, shared), problem_.width, reinterpret_cast<float*>(values_.data() + to));
    }
  }

  template <class Number>
  void transpose_values(const Heads& value, int64_t first, int64_t rows, int64_t shared) {
    for (int64_t row = 0; row < rows; ++row) {
      const auto* from = reinterpret_cast<const Number*>(value.at(first + row, shared));
      auto* to = reinterpret_cast<Number*>(values_.data()) +
                 row / kTileKeys * kTileKeys * problem_.accumulator_rows() + row % kTileKeys;
      for (int64_t k = 0; k < problem_.width; ++k) to[k * kTileKeys] = from[k];
    }
  }

  const Problem& problem_;
  Bytes keys_, values_;
};

// The running softmax of up to problem.lanes() queries of one head, panel by panel or as one block.
class Queries {
 public:
  Queries(const InnerKernels& inner, const Problem& problem)
      : inner_(inner), problem_(problem), lanes_(problem.lanes()), query_(problem.depth() * lanes_),
        accumulator_(problem.accumulator_rows() * lanes_), tile_(kTileKeys * lanes_),
        pairs_(problem.products.number_size() == 2 ? kTileKeys / 2 * lanes_ : 0), maximum_(lanes_), sum_(lanes_),
        limits_(lanes_), spare_(problem.depth()),
        padded_(lanes_ * problem.depth() * problem.products.number_size(), 0) {
    std::fill_n(spare_.get(), problem.depth(), 0.0f);
  }

  // Takes queries rows[0] .. rows[count - 1], which have seen nothing.
  void start(const int64_t* rows, int64_t count, int64_t head) {
    rows_ = rows;
    count_ = count;
    head_ = head;
    if (problem_.products.in_blocks()) {
      pack_queries();
    } else {
      const float* from[kLanes];
      for (int64_t lane = 0; lane < kLanes; ++lane)
        from[lane] = lane < count ? problem_.query.floats(rows[lane], head) : spare_.get();
      inner_.gather(from, problem_.width, problem_.scale, query_.get(), kLanes, vectors_for(count));
    }
    std::fill_n(maximum_.get(), lanes_, -kInfinity);
    std::fill_n(sum_.get(), lanes_, 0.0f);
    std::fill_n(accumulator_.get(), problem_.accumulator_rows() * lanes_, 0.0f);
  }

  // Asks for the next queries: their rows lie too far apart for the processor to foresee them.
  void prefetch(const int64_t* rows, int64_t count, int64_t head) const {
    constexpr int64_t line = 64;
    const int64_t bytes = problem_.width * problem_.query.number_bytes;
    for (int64_t lane = 0; lane < count; ++lane) {
      for (int64_t at = 0; at < bytes; at += line) __builtin_prefetch(problem_.query.at(rows[lane], head) + at);
    }
  }

  // Goes on from what `store_state` left.
  void load_state() {
    const float* from[kBlockLanes];
    for (int64_t lane = 0; lane < lanes_; ++lane) {
      from[lane] = lane < count_ ? problem_.state + place(lane) * problem_.width : spare_.get();
      if (lane < count_) {
        maximum_.get()[lane] = problem_.maximum[place(lane)];
        sum_.get()[lane] = problem_.sum[place(lane)];
      }
    }
    for (int64_t first = 0; first < count_; first += kLanes)
      inner_.gather(from + first, problem_.width, 1.0f, accumulator_.get() + first, lanes_, vectors_from(first));
  }

  // Block-causal: a query at place p sees its window's keys below (p // block + 1) * block.
  void limit_to_blocks(const Layout& layout, int64_t first_row_of_window) {
    for (int64_t lane = 0; lane < lanes_; ++lane) {
      const int64_t row = rows_[std::min(lane, count_ - 1)];
      const int64_t at = layout.query_places ? layout.query_places[row] : row - first_row_of_window;
      limits_.get()[lane] = static_cast<float>((at / layout.block + 1) * layout.block);
    }
  }

  void attend(const HeadCopy& copy, int64_t length, bool limited) {
    const float scale = problem_.products.in_blocks() ? problem_.scale : 1.0f;  // else the query carries it
    for (int64_t at = 0; at < length; at += kTileKeys) {
      const int64_t keys = std::min(kTileKeys, length - at);
      score(copy.keys(at), keys);
      for (int64_t first = 0; first < count_; first += kLanes)
        inner_.attend(tile_.get() + first, lanes_, keys, scale, static_cast<float>(at),
                      limited ? limits_.get() + first : nullptr, maximum_.get() + first, sum_.get() + first,
                      accumulator_.get() + first, problem_.width, vectors_from(first));
      add_values(copy.values(at), keys);
    }
  }

  void store_state() {
    for (int64_t lane = 0; lane < count_; ++lane) {
      problem_.maximum[place(lane)] = maximum_.get()[lane];
      problem_.sum[place(lane)] = sum_.get()[lane];
    }
    store(false);
  }

  // A query that has seen no key has sum 0 and accumulator 0; its result is 0, as the reference's.
  void store_result() {
    for (int64_t lane = 0; lane < lanes_; ++lane)
      sum_.get()[lane] = sum_.get()[lane] == 0.0f ? 0.0f : 1.0f / sum_.get()[lane];
    store(true);
  }

 private:
  int64_t place(int64_t lane) const { return rows_[lane] * problem_.heads + head_; }

  // Of the panel of lanes from `first` on.
  int vectors_from(int64_t first) const { return vectors_for(std::min(kLanes, count_ - first)); }

  void pack_queries() {
    const int64_t size = problem_.products.number_size(), row_bytes = problem_.depth() * size;
    const char* from[kBlockLanes];
    for (int64_t lane = 0; lane < lanes_; ++lane) {
      char* row = padded_.data() + lane * row_bytes;
      if (lane < count_) {
        std::memcpy(row, problem_.query.at(rows_[lane], head_), problem_.width * size);
      } else {
        std::memset(row, 0, row_bytes);
      }
      from[lane] = row;
    }
    pack_block(from, row_bytes / kWord, reinterpret_cast<char*>(query_.get()));
  }

  // The tile's products of `keys` keys with the queries.
  void score(const char* from, int64_t keys) {
    const int64_t depth = problem_.depth();
    if (!problem_.products.in_blocks()) {
      return inner_.product(reinterpret_cast<const float*>(from), depth, 1, keys, depth, query_.get(), tile_.get(),
                            false, vectors_for(count_));
    }
    for (int64_t row = 0; row < keys; row += kBlockRows)
      block_product(problem_.products, from + row * depth * problem_.products.number_size(), depth, kBlockRows, depth,
                    reinterpret_cast<const char*>(query_.get()), tile_.get() + row * lanes_, false);
  }

  // Adds the values of `keys` keys, weighted by the tile, to the accumulators.
  void add_values(const char* from, int64_t keys) {
    const int64_t width = problem_.width;
    if (!problem_.products.in_blocks()) {
      return inner_.product(reinterpret_cast<const float*>(from), 1, width, width, keys, tile_.get(),
                            accumulator_.get(), true, vectors_for(count_));
    }
    const int64_t depth = round_up(keys, kDepthStep);
    std::fill_n(tile_.get() + keys * lanes_, (depth - keys) * lanes_, 0.0f);
    const float* weights = tile_.get();
    if (problem_.products.number_size() == 2) {
      inner_.pair_rows(tile_.get(), lanes_, depth, reinterpret_cast<uint32_t*>(pairs_.get()));
      weights = pairs_.get();
    }
    block_product(problem_.products, from, kTileKeys, problem_.accumulator_rows(), depth,
                  reinterpret_cast<const char*>(weights), accumulator_.get(), true);
  }

  void store(bool divided) {
    float* to[kBlockLanes];
    for (int64_t lane = 0; lane < lanes_; ++lane)
      to[lane] = lane < count_ ? problem_.state + place(lane) * problem_.width : spare_.get();
    for (int64_t first = 0; first < count_; first += kLanes)
      inner_.scatter(accumulator_.get() + first, lanes_, problem_.width, divided ? sum_.get() + first : nullptr,
                     to + first, vectors_from(first));
  }

  const InnerKernels& inner_;
  const Problem& problem_;
  const int64_t lanes_;
  Scratch query_, accumulator_, tile_, pairs_, maximum_, sum_, limits_, spare_;
  std::vector<char> padded_;
  const int64_t* rows_ = nullptr;
  int64_t count_ = 0, head_ = 0;
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
  TORCH_CHECK(query.size(2) > 0, "prefix_attention: the heads must be at least 1 wide; got query ", query.sizes());
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
  // Keys and values are converted as their heads are copied: the arena of prefixes holds many times what is seen.
  const at::ScalarType type = query.scalar_type();
  const Products products = choose_products("prefix_attention", products_asked, type,
                                            type == at::kHalf ? "the inputs are float16" : "");
  const at::Tensor q = last_contiguous(products.in_blocks() ? query : query.to(at::kFloat));
  const at::Tensor k = last_contiguous(key), v = last_contiguous(value);
  const at::Tensor pk = last_contiguous(prefix_key), pv = last_contiguous(prefix_value);
  const int64_t heads = q.size(1), width = q.size(2);
  at::Tensor out = at::empty({q.size(0), heads, width}, q.options().dtype(at::kFloat));
  Scratch maximum(q.size(0) * heads), sum(q.size(0) * heads);
  const Layout layout{key_offsets.const_data_ptr<int64_t>(),    query_offsets.const_data_ptr<int64_t>(),
                      prefix_starts.const_data_ptr<int64_t>(),  prefix_lengths.const_data_ptr<int64_t>(),
                      query_places ? query_places->const_data_ptr<int64_t>() : nullptr,
                      prefix_starts.numel(), block};
  const float scale = 1.0f / std::sqrt(static_cast<float>(width));
  const Problem problem{Heads(q), Heads(k), Heads(v), Heads(pk), Heads(pv), layout, heads, heads / k.size(1), width,
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
