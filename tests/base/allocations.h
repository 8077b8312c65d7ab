// Counts allocations, for readers that a small file must never bring to a large one. To be included in one file of a
// program: operator new is not inline.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

// The largest single allocation since it was last set to zero.
static std::atomic<std::size_t> largest_allocation = 0;

// Weak: the thread sanitizer brings its own operators, and nothing is counted then. Not inlined: g++ 12 would see
// free() on memory of operator new and warn.
[[gnu::noinline, gnu::weak]] void* operator new(std::size_t size) {
  largest_allocation = std::max(largest_allocation.load(), size);
  if (void* memory = std::malloc(std::max<std::size_t>(size, 1))) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline, gnu::weak]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline, gnu::weak]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
