// Between the parts of the stand-in.
#pragma once
#include <cuda_runtime.h>

#include <cstddef>
#include <functional>
#include <mutex>

#include "standin.h"

#if defined(__SANITIZE_ADDRESS__)
#define STANDIN_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define STANDIN_ASAN 1
#endif
#endif

#ifdef STANDIN_ASAN
#include <sanitizer/common_interface_defs.h>
#endif

// The library is compiled without -fsanitize=thread, so that only what is said here orders memory; the build says so.
#ifdef STANDIN_TSAN
#include <sanitizer/tsan_interface.h>
#endif

namespace standin {

[[noreturn, gnu::format(printf, 1, 2)]] void stop(const char* format, ...);

// Contexts of ThreadSanitizer; nothing without it. A switch orders nothing; release and acquire of an address do.
namespace tsan {
#ifdef STANDIN_TSAN
inline void* current() { return __tsan_get_current_fiber(); }
inline void* create() { return __tsan_create_fiber(0); }
inline void destroy(void* context) { __tsan_destroy_fiber(context); }
inline void enter(void* context) { __tsan_switch_to_fiber(context, __tsan_switch_to_fiber_no_sync); }
inline void acquire(void* p) { __tsan_acquire(p); }
inline void release(void* p) { __tsan_release(p); }
#else
inline void* current() { return nullptr; }
inline void* create() { return nullptr; }
inline void destroy(void*) {}
inline void enter(void*) {}
inline void acquire(void*) {}
inline void release(void*) {}
#endif
}  // namespace tsan

// Memory with exact bounds: the sanitizer's red zones, or guard bytes that are looked at.
struct Buffer {
  char* data = nullptr;
  std::size_t size = 0;
};
Buffer make_buffer(std::size_t size, std::size_t alignment);  // data null: no memory
bool intact(const Buffer& buffer);                            // of guard bytes
void drop_buffer(Buffer& buffer);
void fill_fresh(void* p, std::size_t size);

enum class Place { host, device, pinned };
struct Region {
  Place place = Place::host;
  std::size_t left = 0;  // bytes from the address to the end of its allocation
};
Region find(const void* p);
void check_guards(const char* after);  // of all device memory

struct Grid {
  const void* kernel;
  dim3 grid, block;
  std::size_t smem, smem_limit;  // dynamic shared memory: of the launch, and what the kernel may have
  const std::function<void()>* body;
};
void run(const Grid& grid);
std::size_t smem_limit(const void* kernel);
bool in_kernel();

// Streams, for the library calls that enqueue (cublaslt.cpp).
using Work = std::function<void()>;
cudaError_t enqueue_work(cudaStream_t stream, Work work);
std::recursive_mutex& lock();
void count_handle(int change);

}  // namespace standin
