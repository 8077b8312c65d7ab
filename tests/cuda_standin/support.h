// For tests: device memory as an object, and all the ways in which the device may behave.
#pragma once
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "standin.h"

namespace standin_test {

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define STANDIN_TEST_TSAN 1
#endif
#endif
#ifdef STANDIN_TEST_TSAN
constexpr bool thread_sanitizer = true;
#else
constexpr bool thread_sanitizer = false;
#endif

inline void ok(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

template <class T>
class Device {
 public:
  explicit Device(std::size_t n) : n_(n) { ok(cudaMalloc(&p_, n * sizeof(T))); }
  explicit Device(const std::vector<T>& host) : Device(host.size()) {
    ok(cudaMemcpy(p_, host.data(), n_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  ~Device() { cudaFree(p_); }
  operator T*() const { return p_; }
  std::vector<T> host() const {
    std::vector<T> out(n_);
    ok(cudaMemcpy(out.data(), p_, n_ * sizeof(T), cudaMemcpyDeviceToHost));
    return out;
  }

 private:
  T* p_ = nullptr;
  std::size_t n_;
};

// Orders, queues, copies, memory's first contents: every one away from the default at least once.
inline std::vector<std::pair<std::string, standin::Mode>> modes() {
  using standin::Fill, standin::Mode, standin::Order;
  std::vector<std::pair<std::string, Mode>> all;
  all.emplace_back("forward", Mode{});
  all.emplace_back("reversed", Mode{.order = Order::reversed});
  for (unsigned seed : {1u, 2u, 3u}) all.emplace_back("random", Mode{.order = Order::random, .seed = seed});
  all.emplace_back("lazy", Mode{.lazy = true});
  all.emplace_back("late", Mode{.late_copies = true});
  all.emplace_back("huge", Mode{.fill = Fill::huge});
  all.emplace_back("low", Mode{.fill = Fill::low});
  return all;
}

template <class Body>
void in_every_mode(Body body) {
  for (const auto& [name, mode] : modes()) {
    SCOPED_TRACE(name);
    standin::mode() = mode;
    body();
  }
  standin::mode() = {};
}

}  // namespace standin_test
