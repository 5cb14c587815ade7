#include "host/threads.h"

#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <system_error>

namespace cutlass_ops {
namespace {

// A pool of threads. The caller does not wait for a helper that starts after all work is done: if
// other processes occupy the cores, work takes no longer than on the caller's thread alone.
class Helpers {
 public:
  void run(int wanted, void (*work)(void*), void* data) {
    std::unique_lock<std::mutex> const turn(turn_, std::try_to_lock);
    if (!turn) return work(data);  // another thread of this process has the helpers
    {
      std::lock_guard<std::mutex> const lock(mutex_);
      start(wanted);
      work_ = work, data_ = data, wanted_ = wanted;
      job_.fetch_add(1, std::memory_order_release);
    }
    come_.notify_all();
    work(data);
    std::unique_lock<std::mutex> lock(mutex_);
    wanted_ = 0;
    for (int i = 0; i < kYields && active_ > 0; ++i) {
      lock.unlock();
      std::this_thread::yield();
      lock.lock();
    }
    done_.wait(lock, [this] { return active_ == 0; });
  }

 private:
  static constexpr int kYields = 100;  // some tens of microseconds, the time between two products
                                       // of a model

  void start(int wanted) {
    try {
      for (; threads_ < wanted; ++threads_)
        std::thread([this, seen = job_.load()] { help(seen); }).detach();
    } catch (std::system_error const&) {
      // The system provides no more threads: the running ones and the caller do all of the work.
    }
  }

  void help(uint64_t seen) {
    for (;;) {
      for (int i = 0; i < kYields && job_.load(std::memory_order_acquire) == seen; ++i)
        std::this_thread::yield();
      std::unique_lock<std::mutex> lock(mutex_);
      come_.wait(lock, [&] { return job_.load() != seen; });
      seen = job_.load();
      if (wanted_ == 0) continue;
      --wanted_, ++active_;
      auto const work = work_;
      void* const data = data_;
      lock.unlock();
      work(data);
      lock.lock();
      if (--active_ == 0) done_.notify_one();
    }
  }

  // turn_ is held by the caller that uses the helpers, mutex_ guards the members below.
  std::mutex turn_, mutex_;
  std::condition_variable come_, done_;
  std::atomic<uint64_t> job_{0};
  void (*work_)(void*) = nullptr;
  void* data_ = nullptr;
  int threads_ = 0, wanted_ = 0, active_ = 0;
};

// The pool of this process; a forked process has none of its parent's threads. Never destroyed,
// because threads use it until the process ends.
Helpers& helpers() {
  struct Owned {
    pid_t process;
    Helpers helpers;
  };
  static std::atomic<Owned*> owned{nullptr};
  Owned* found = owned.load();
  if (found && found->process == getpid()) return found->helpers;
  auto* const made = new Owned{getpid(), {}};
  if (owned.compare_exchange_strong(found, made)) return made->helpers;
  delete made;
  return found->helpers;
}

}  // namespace

void run_on_threads(int threads, void (*work)(void*), void* data) {
  threads <= 1 ? work(data) : helpers().run(threads - 1, work, data);
}

}  // namespace cutlass_ops
