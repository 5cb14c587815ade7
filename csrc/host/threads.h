// A loop over the host's cores.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <thread>

namespace cutlass_ops {

// Runs work(data), which throws nothing, on up to `threads` threads, the caller included, and waits
// for those that have begun. The helpers are kept for the next call.
void run_on_threads(int threads, void (*work)(void*), void* data);

inline int core_count() { return int(std::max(1u, std::thread::hardware_concurrency())); }

// Runs work(0) .. work(count - 1), in any order, on up to `threads` threads (0: every core).
// Threads take `batch` indices at a time, which should be some tens of microseconds of work.
// What work throws first, as where memory is short, ends the loop and is thrown again.
template <class Work>
void for_each_index(int64_t count, int64_t batch, int threads, Work const& work) {
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  std::exception_ptr failure;  // of the thread that set `failed`
  auto run = [&] {
    try {
      for (;;) {
        int64_t const first = next.fetch_add(batch);
        if (first >= count) return;
        int64_t const last = std::min(count, first + batch);
        for (int64_t index = first; index < last; ++index) work(index);
      }
    } catch (...) {
      next = count;
      if (!failed.exchange(true)) failure = std::current_exception();
    }
  };
  int64_t const wanted = threads > 0 ? threads : core_count();
  int64_t const batches = (count + batch - 1) / batch;
  run_on_threads(
      int(std::min(wanted, batches)), [](void* data) { (*static_cast<decltype(run)*>(data))(); },
      &run);
  if (failure) std::rethrow_exception(failure);
}

}  // namespace cutlass_ops
