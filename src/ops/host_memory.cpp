#include "ops/host_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "base/arena.h"
#include "base/error.h"

namespace rownorm {
namespace {

// What can be had without swapping, in bytes (proc(5), /proc/meminfo); -1 when the system does not say.
std::int64_t available_memory() {
  std::ifstream file("/proc/meminfo");
  std::string key, unit;
  std::int64_t kibibytes = 0;
  while (file >> key >> kibibytes) {
    if (key == "MemAvailable:") return kibibytes * 1024;
    std::getline(file, unit);
  }
  return -1;
}

}  // namespace

Memory allocate_host_memory(const std::string& device, std::int64_t bytes) {
  const std::int64_t available = available_memory();
  if (bytes < 0 || (available >= 0 && bytes > available))
    fail(Exit::device, "[memory] {}: needs {} ({} bytes), {} available", device, human_bytes(bytes), bytes,
         human_bytes(available));
  const auto size = static_cast<std::size_t>(std::max<std::int64_t>(bytes, 1));
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED)
    fail(Exit::device, "[memory] {}: needs {}: {}", device, human_bytes(bytes), std::strerror(errno));
  madvise(memory, size, MADV_HUGEPAGE);
  constexpr std::size_t page = 4096;
#pragma omp parallel for schedule(static) if (size >= 1024 * page)
  for (std::size_t at = 0; at < size; at += page) static_cast<volatile char*>(memory)[at] = 0;
  return Memory(memory, [size](void* p) { munmap(p, size); });
}

}  // namespace rownorm
