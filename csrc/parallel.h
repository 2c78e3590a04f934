// Dynamic sharing of independent units of work between ATen's threads.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>

namespace diffscore {

// Calls work(claim) on each thread; `claim(unit)` takes the next unit, or returns false if none is left. Any thread may
// take any unit, so units must not share sums.
template <class Work>
void share_units(int64_t units, const Work& work) {
  std::atomic<int64_t> next{0};
  const auto claim = [&](int64_t& unit) { return (unit = next.fetch_add(1)) < units; };
  const int64_t threads = std::min<int64_t>(units, at::get_num_threads());
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) { work(claim); });
}

// Scratch aligned to a cache line, not initialised.
class Scratch {
 public:
  explicit Scratch(int64_t floats)
      : data_(static_cast<float*>(::operator new(sizeof(float) * std::max<int64_t>(floats, 1), std::align_val_t(64)))) {}
  ~Scratch() { ::operator delete(data_, std::align_val_t(64)); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  float* get() const { return data_; }

 private:
  float* data_;
};

}  // namespace diffscore
