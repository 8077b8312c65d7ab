#include "ops/host_memory.h"

#include <omp.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "base/arena.h"
#include "base/error.h"

namespace rownorm {
namespace {

// What this process can have without swapping, in bytes: the machine's (proc(5), /proc/meminfo) and its control group's
// (cgroup v2, as containers and Slurm set it), whichever is less; INT64_MAX when the system does not say.
std::int64_t available_memory() {
  std::int64_t available = INT64_MAX;
  std::ifstream machine("/proc/meminfo");
  std::string key, unit;
  for (std::int64_t kibibytes = 0; machine >> key >> kibibytes; std::getline(machine, unit))
    if (key == "MemAvailable:") available = kibibytes * 1024;

  std::ifstream group("/proc/self/cgroup");  // "0::/path"
  for (std::string line; std::getline(group, line);) {
    if (!line.starts_with("0::/")) continue;
    const std::string folder = "/sys/fs/cgroup" + line.substr(3);
    std::int64_t limit = 0, used = 0;
    if (std::ifstream(folder + "/memory.max") >> limit && std::ifstream(folder + "/memory.current") >> used)
      available = std::min(available, std::max<std::int64_t>(limit - used, 0));
  }
  return available;
}

// What an address-space limit (ulimit -v) leaves beside the buffers that OpenBLAS maps for each thread at its first
// product: without them it would try for ever.
std::int64_t available_addresses() {
  constexpr std::int64_t blas_buffer = std::int64_t{128} << 20;
  rlimit limit{};
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return INT64_MAX;
  std::int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const std::int64_t used = pages * sysconf(_SC_PAGESIZE) + omp_get_max_threads() * blas_buffer;
  return std::max<std::int64_t>(static_cast<std::int64_t>(limit.rlim_cur) - used, 0);
}

}  // namespace

Memory allocate_host_memory(const std::string& device, std::int64_t bytes, int processes) {
  const std::int64_t available = std::min(available_memory() / processes, available_addresses());
  if (bytes < 0 || bytes > available)
    fail(Exit::device, "[memory] {}: needs {} ({} bytes), {} available{}", device, human_bytes(bytes), bytes,
         human_bytes(available), processes > 1 ? fmt::format(" to each of {} ranks", processes) : "");
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
