#include "host_threads.h"

#include <dlfcn.h>
#include <unistd.h>

#include <system_error>
#include <thread>
#include <vector>

namespace cutlass_ops {
namespace {

using Parallel = void (*)(void (*work)(void*), void* data, unsigned threads, unsigned flags);

pid_t const kProcess = getpid();

// How OpenMP starts a region, if the process has it for all to see: then its threads, which wait for such work already, are
// torch's. A process that was forked has none of them, and OpenMP would wait for them.
Parallel openmp() {
  static auto const found = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  return getpid() == kProcess ? found : nullptr;
}

}  // namespace

void run_on_threads(int threads, void (*work)(void*), void* data) {
  if (threads <= 1) return work(data);
  if (Parallel const parallel = openmp()) return parallel(work, data, unsigned(threads), 0);
  std::vector<std::thread> helpers;
  helpers.reserve(size_t(threads - 1));
  try {
    while (int(helpers.size()) < threads - 1) helpers.emplace_back(work, data);
  } catch (std::system_error const&) {
    // The system gives no more threads: those that run, and this one, do all of the work.
  }
  work(data);
  for (std::thread& helper : helpers) helper.join();
}

}  // namespace cutlass_ops
