// Large pages for large results on the host.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace cutlass_ops {

// Requests pages of 2 MB under [data, data + bytes), which is about to be written for the first
// time: the system then maps one page instead of 512, which would take longer than packing. It is
// only a hint: without large pages nothing changes.
inline void prefer_large_pages([[maybe_unused]] void* data, [[maybe_unused]] size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = uintptr_t(1) << 21;
  uintptr_t const begin = (reinterpret_cast<uintptr_t>(data) + kPage - 1) / kPage * kPage;
  uintptr_t const end = (reinterpret_cast<uintptr_t>(data) + bytes) / kPage * kPage;
  if (begin < end) (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace cutlass_ops
