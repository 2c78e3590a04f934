// The running softmax of a panel or a block of attention queries; a part of prefix_attention.cpp, its only user.
//
// A lane is a query: 24 of them are a panel, and 48 a block, where products are made in blocks. Scores exist only as a
// tile of 128 keys, with keys down and queries across, so that maximum and sum need no work across a vector. In blocks
// of bfloat16, the softmax's weights are rounded to bfloat16 before their product with the values, because matrix units
// take no other; their sum is that of the weights before rounding.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <vector>

#include "brgemm.h"
#include "convert.h"
#include "inner.h"
#include "parallel.h"
#include "rows.h"

namespace diffscore {
namespace {

constexpr int64_t kTileKeys = 128;
constexpr int64_t kRowStep = 16;  // in blocks, an accumulator's rows are padded to a multiple: the rows of an AMX tile
constexpr float kInfinity = std::numeric_limits<float>::infinity();

constexpr int64_t round_up(int64_t count, int64_t step) {
  return (count + step - 1) / step * step;
}

// Rows of a [N, heads, head_dim] tensor in float32, bfloat16 or float16, with the last dimension contiguous.
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

struct Problem {
  Heads query;  // float32, or the products' type
  Heads key, value, prefix_key, prefix_value;
  Layout layout;
  int64_t heads, group, head_dim;  // `group` query heads share a key-value head
  float scale;
  Products products;
  float* state;                 // [Q, heads, head_dim]: accumulators after stage one, the result after stage two
  float *maximum, *sum;         // [Q, heads]

  int64_t lanes() const { return products.in_blocks() ? kBlockLanes : kLanes; }
  // In blocks a head's numbers and an accumulator's rows are padded with zeros to these.
  int64_t depth() const { return products.in_blocks() ? round_up(head_dim, kDepthStep) : head_dim; }
  int64_t accumulator_rows() const { return products.in_blocks() ? round_up(head_dim, kRowStep) : head_dim; }
};

// Bytes aligned to a cache line.
class Bytes {
 public:
  // Makes room for `size` bytes; what was there is lost.
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

// Keys and values of one head, copied to be contiguous: in the tensors, the rows of many heads lie a multiple of a large
// power of two apart, and a strided walk would use few cache sets. For panels, float32 [rows, head_dim] each. For blocks,
// the products' type: whole blocks of keys [rows, depth], and each tile's values transposed, [accumulator_rows,
// kTileKeys], padded with 0.
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
                  problem_.head_dim * problem_.products.number_size());
    if (problem_.products.number_size() == 2) {
      transpose_pairs(value, first, rows, shared);
    } else {
      transpose_values(value, first, rows, shared);
    }
  }

  // The keys, starting with key `row`.
  const char* keys(int64_t row) const { return keys_.data() + row * key_bytes(); }
  // The values, starting with value `row`, which for blocks is the first of a tile.
  const char* values(int64_t row) const {
    const int64_t numbers = problem_.products.in_blocks() ? problem_.accumulator_rows() : problem_.head_dim;
    return values_.data() + row * numbers * problem_.products.number_size();
  }

 private:
  int64_t key_bytes() const { return problem_.depth() * problem_.products.number_size(); }

  void fill_rows(const Heads& key, const Heads& value, int64_t first, int64_t rows, int64_t shared) {
    keys_.hold(rows * key_bytes());
    values_.hold(rows * key_bytes());
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t from = first + row, to = row * key_bytes();
      to_floats(key.type, key.at(from, shared), problem_.head_dim, reinterpret_cast<float*>(keys_.data() + to));
      to_floats(value.type, value.at(from, shared), problem_.head_dim, reinterpret_cast<float*>(values_.data() + to));
    }
  }

  void transpose_pairs(const Heads& value, int64_t first, int64_t rows, int64_t shared) {
    for (int64_t row = 0; row < rows; row += kTileKeys)
      row_kernels().transpose_pairs(
          value.at(first + row, shared), value.row_bytes, std::min(kTileKeys, rows - row), problem_.head_dim,
          reinterpret_cast<uint32_t*>(values_.data()) + row / 2 * problem_.accumulator_rows(), kTileKeys / 2);
  }

  void transpose_values(const Heads& value, int64_t first, int64_t rows, int64_t shared) {
    for (int64_t row = 0; row < rows; ++row) {
      const float* from = value.floats(first + row, shared);
      float* to = reinterpret_cast<float*>(values_.data()) +
                  row / kTileKeys * kTileKeys * problem_.accumulator_rows() + row % kTileKeys;
      for (int64_t k = 0; k < problem_.head_dim; ++k) to[k * kTileKeys] = from[k];
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
    // Lanes without a query keep the weights of an earlier block, at first these; nothing reads their sums.
    std::fill_n(pairs_.get(), problem.products.number_size() == 2 ? kTileKeys / 2 * lanes_ : 0, 0.0f);
  }

  // Takes queries rows[0] .. rows[count - 1], with an empty softmax.
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
      inner_.gather(from, problem_.head_dim, problem_.scale, query_.get(), kLanes, vectors_for(count));
    }
    std::fill_n(maximum_.get(), lanes_, -kInfinity);
    std::fill_n(sum_.get(), lanes_, 0.0f);
    std::fill_n(accumulator_.get(), problem_.accumulator_rows() * lanes_, 0.0f);
  }

  // Prefetches the next queries, whose rows are too far apart for the processor to predict.
  void prefetch(const int64_t* rows, int64_t count, int64_t head) const {
    constexpr int64_t line = 64;
    const int64_t bytes = problem_.head_dim * problem_.query.number_bytes;
    for (int64_t lane = 0; lane < count; ++lane) {
      for (int64_t at = 0; at < bytes; at += line) __builtin_prefetch(problem_.query.at(rows[lane], head) + at);
    }
  }

  // Continues from what `store_state` left.
  void load_state() {
    const float* from[kBlockLanes];
    for (int64_t lane = 0; lane < lanes_; ++lane) {
      from[lane] = lane < count_ ? problem_.state + place(lane) * problem_.head_dim : spare_.get();
      if (lane < count_) {
        maximum_.get()[lane] = problem_.maximum[place(lane)];
        sum_.get()[lane] = problem_.sum[place(lane)];
      }
    }
    for (int64_t first = 0; first < count_; first += kLanes)
      inner_.gather(from + first, problem_.head_dim, 1.0f, accumulator_.get() + first, lanes_, vectors_from(first));
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
    const float scale = problem_.products.in_blocks() ? problem_.scale : 1.0f;  // else the packed queries include it
    for (int64_t at = 0; at < length; at += kTileKeys) {
      const int64_t keys = std::min(kTileKeys, length - at);
      score(copy.keys(at), keys);
      if (problem_.products.number_size() == 2) {
        attend_in_pairs(copy, at, keys, limited);
        continue;
      }
      for (int64_t first = 0; first < count_; first += kLanes)
        inner_.attend(tile_.get() + first, lanes_, keys, scale, static_cast<float>(at),
                      limited ? limits_.get() + first : nullptr, maximum_.get() + first, sum_.get() + first,
                      accumulator_.get() + first, problem_.head_dim, vectors_from(first));
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

  // A query that has seen no key has sum 0 and accumulator 0; its result is 0, as in the reference.
  void store_result() {
    for (int64_t lane = 0; lane < lanes_; ++lane)
      sum_.get()[lane] = sum_.get()[lane] == 0.0f ? 0.0f : 1.0f / sum_.get()[lane];
    store(true);
  }

 private:
  int64_t place(int64_t lane) const { return rows_[lane] * problem_.heads + head_; }

  // Vectors of the panel whose first lane is `first`.
  int vectors_from(int64_t first) const { return vectors_for(std::min(kLanes, count_ - first)); }

  void pack_queries() {
    const int64_t size = problem_.products.number_size(), row_bytes = problem_.depth() * size;
    const char* from[kBlockLanes];
    for (int64_t lane = 0; lane < lanes_; ++lane) {
      char* row = padded_.data() + lane * row_bytes;
      if (lane < count_) {
        std::memcpy(row, problem_.query.at(rows_[lane], head_), problem_.head_dim * size);
      } else {
        std::memset(row, 0, row_bytes);
      }
      from[lane] = row;
    }
    pack_block(from, row_bytes / kWord, reinterpret_cast<char*>(query_.get()));
  }

  // Fills the tile with the products of `keys` keys with the queries.
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
    const int64_t head_dim = problem_.head_dim;
    if (!problem_.products.in_blocks()) {
      return inner_.product(reinterpret_cast<const float*>(from), 1, head_dim, head_dim, keys, tile_.get(),
                            accumulator_.get(), true, vectors_for(count_));
    }
    const int64_t depth = round_up(keys, kDepthStep);
    std::fill_n(tile_.get() + keys * lanes_, (depth - keys) * lanes_, 0.0f);
    weigh_values(from, depth, tile_.get());
  }

  // In blocks: adds the values of a tile's first `depth` keys, weighted by `weights`, to the accumulators.
  void weigh_values(const char* from, int64_t depth, const float* weights) {
    block_product(problem_.products, from, kTileKeys, problem_.accumulator_rows(), depth,
                  reinterpret_cast<const char*>(weights), accumulator_.get(), true);
  }

  // The softmax and the values of a tile's keys, with weights in bfloat16.
  void attend_in_pairs(const HeadCopy& copy, int64_t first_key, int64_t keys, bool limited) {
    auto* pairs = reinterpret_cast<uint32_t*>(pairs_.get());
    const int64_t depth = round_up(keys, kDepthStep), written = (keys + 1) / 2 * lanes_;
    row_kernels().attend_in_pairs(tile_.get(), lanes_, keys, problem_.scale, static_cast<float>(first_key),
                                  limited ? limits_.get() : nullptr, maximum_.get(), sum_.get(), accumulator_.get(),
                                  problem_.head_dim, pairs, round_up(count_, kRowVector));
    std::fill_n(pairs + written, depth / 2 * lanes_ - written, 0u);
    weigh_values(copy.values(first_key), depth, pairs_.get());
  }

  void store(bool divided) {
    float* to[kBlockLanes];
    for (int64_t lane = 0; lane < lanes_; ++lane)
      to[lane] = lane < count_ ? problem_.state + place(lane) * problem_.head_dim : spare_.get();
    for (int64_t first = 0; first < count_; first += kLanes)
      inner_.scatter(accumulator_.get() + first, lanes_, problem_.head_dim, divided ? sum_.get() + first : nullptr,
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

}  // namespace
}  // namespace diffscore
