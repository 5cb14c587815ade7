#include "host/threads.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <list>
#include <mutex>
#include <string>
#include <system_error>
#include <vector>

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
      keep_apart();
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

  struct Helper {
    pthread_t thread;
    int cpu = -1;  // where it last worked
  };

  void start(int wanted) {
    try {
      while (int(all_.size()) < wanted) {
        all_.emplace_back();
        std::thread thread([this, self = &all_.back(), seen = job_.load()] { help(*self, seen); });
        all_.back().thread = thread.native_handle();
        thread.detach();
      }
    } catch (std::system_error const&) {
      // The system provides no more threads: the running ones and the caller do all of the work.
      all_.pop_back();
    }
  }

  // Linux may wake a helper on the CPU where it last ran although the caller is there now: both
  // share it for milliseconds while another is idle (docs/tuning-notes.md). Such a helper may run
  // on the caller's other CPUs only.
  void keep_apart() {
    int const here = sched_getcpu();
    for (Helper& helper : all_) {
      cpu_set_t cpus;
      if (helper.cpu != here || here < 0 || sched_getaffinity(0, sizeof cpus, &cpus) != 0) continue;
      CPU_CLR(here, &cpus);
      if (CPU_COUNT(&cpus) > 0) pthread_setaffinity_np(helper.thread, sizeof cpus, &cpus);
    }
  }

  void help(Helper& self, uint64_t seen) {
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
      self.cpu = sched_getcpu();
      if (--active_ == 0) done_.notify_one();
    }
  }

  // turn_ is held by the caller that uses the helpers, mutex_ guards the members below.
  std::mutex turn_, mutex_;
  std::condition_variable come_, done_;
  std::atomic<uint64_t> job_{0};
  void (*work_)(void*) = nullptr;
  void* data_ = nullptr;
  std::list<Helper> all_;
  int wanted_ = 0, active_ = 0;
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

// The OpenMP runtime that this process has loaded (torch's), by the function that GCC and LLVM both
// have; null: none.
using Parallel = void (*)(void (*)(void*), void*, unsigned threads, unsigned flags);
Parallel find_openmp() {
  std::vector<std::string> names;
  auto const add = [](dl_phdr_info* info, size_t, void* found) {
    std::string const name = info->dlpi_name, file = name.substr(name.rfind('/') + 1);
    for (char const* runtime : {"libgomp", "libomp", "libiomp"})
      if (file.rfind(runtime, 0) == 0)
        static_cast<std::vector<std::string>*>(found)->push_back(name);
    return 0;
  };
  dl_iterate_phdr(add, &names);
  for (std::string const& name : names) {
    void* const library = dlopen(name.c_str(), RTLD_LAZY | RTLD_NOLOAD);
    void* const found = library ? dlsym(library, "GOMP_parallel") : nullptr;
    if (found) return reinterpret_cast<Parallel>(found);
  }
  return nullptr;
}

// The process that loaded this library: one that it forks cannot use its OpenMP threads.
pid_t const loading_process = getpid();

// Work for OpenMP's threads, of which one other than the caller leaves the clock of its CPU time.
struct OnOpenMP {
  void (*work)(void*);
  void* data;
  pthread_t caller;
  std::atomic<clockid_t>* clock;

  static void run(void* self) {
    auto const& on = *static_cast<OnOpenMP*>(self);
    clockid_t clock;
    if (!pthread_equal(pthread_self(), on.caller) &&
        pthread_getcpuclockid(pthread_self(), &clock) == 0)
      on.clock->store(clock, std::memory_order_relaxed);
    on.work(on.data);
  }
};

constexpr clockid_t kNoClock = -1;

// Whether the thread of a clock is at work, or spins, on a CPU.
bool runs(clockid_t clock) {
  timespec before, after;
  return clock != kNoClock && clock_gettime(clock, &before) == 0 &&
         clock_gettime(clock, &after) == 0 &&
         (before.tv_sec != after.tv_sec || before.tv_nsec != after.tv_nsec);
}

}  // namespace

// OpenMP's threads spin for milliseconds after a loop of torch's, and helpers would share their
// CPUs with them: then they are used themselves, and for loops that follow soon. After a rest they
// sleep, and OpenMP waits for each that Linux wakes on the caller's CPU (docs/tuning-notes.md).
void run_on_threads(int threads, void (*work)(void*), void* data) {
  using Clock = std::chrono::steady_clock;
  static std::atomic<Clock::time_point> last_end{Clock::time_point()};
  static std::atomic<clockid_t> clock{kNoClock};  // of one of OpenMP's threads
  static Parallel const parallel = find_openmp();
  if (threads <= 1) return work(data);
  bool const soon = Clock::now() - last_end.load() < std::chrono::milliseconds(2);
  if (parallel && loading_process == getpid() && (soon || runs(clock))) {
    // OpenMP would start threads for each caller.
    static std::mutex mutex;
    std::unique_lock<std::mutex> const turn(mutex, std::try_to_lock);
    OnOpenMP on{work, data, pthread_self(), &clock};
    turn ? parallel(OnOpenMP::run, &on, unsigned(threads), 0) : work(data);
  } else {
    helpers().run(threads - 1, work, data);
  }
  last_end = Clock::now();
}

}  // namespace cutlass_ops
