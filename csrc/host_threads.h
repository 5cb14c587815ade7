// A loop over the host's cores.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace cutlass_ops {

// Runs work(0) .. work(count - 1), in any order, on up to `threads` threads (0: every core). Threads take `batch` indices at a
// time, which should be some tens of microseconds of work.
template <class Work>
void for_each_index(int64_t count, int64_t batch, int threads, Work const& work) {
  std::atomic<int64_t> next{0};
  auto const run = [&] {
    for (;;) {
      int64_t const first = next.fetch_add(batch);
      if (first >= count) return;
      int64_t const last = std::min(count, first + batch);
      for (int64_t index = first; index < last; ++index) work(index);
    }
  };

  int64_t const batches = (count + batch - 1) / batch;
  int64_t const wanted = threads > 0 ? threads : std::max(1u, std::thread::hardware_concurrency());
  std::vector<std::thread> helpers;
  helpers.reserve(std::min(wanted, batches));
  try {
    while (int64_t(helpers.size()) + 1 < std::min(wanted, batches)) helpers.emplace_back(run);
  } catch (std::system_error const&) {
    // The system gives no more threads: those that run, and this one, do all of the work.
  }
  run();
  for (std::thread& helper : helpers) helper.join();
}

}  // namespace cutlass_ops
