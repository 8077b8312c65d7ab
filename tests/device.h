// Backends for tests, and tensors on them: memory that lives as long as the test, and values as doubles.
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/arena.h"
#include "ops/backend.h"
#include "ops/open.h"

// The backends that a test program is about, by name; tests/cuda builds the same tests for the CUDA module.
#ifndef ROWNORM_TEST_BACKENDS
#define ROWNORM_TEST_BACKENDS "reference", "cpu"
#endif

namespace rownorm::testing {

// A device's name, with "_" and a precision where it has several: "cuda_fp32".
inline std::unique_ptr<Backend> open(const std::string& name) {
  const std::size_t end = name.find('_');
  return open_backend(name.substr(0, end), end == std::string::npos ? "auto" : name.substr(end + 1));
}

// Plans with a measuring arena, allocates, and builds again: what a run does.
class Device {
 public:
  Device(Backend& be, const WorkspaceSizes& sizes, const std::function<void(Arena&)>& build) {
    const auto whole = [&](Arena& arena) {
      build(arena);
      workspace_ = arena.add("workspace", DType::u8, {be.workspace_bytes(sizes)});
    };
    Arena plan;
    whole(plan);
    memory_ = be.allocate(plan.bytes());
    Arena arena(memory_.get(), plan.bytes());
    whole(arena);
    be.set_workspace(workspace_, sizes);
  }

 private:
  Memory memory_;
  Tensor workspace_;
};

inline void put(Backend& be, Tensor t, const std::vector<double>& values) {
  if (static_cast<std::int64_t>(values.size()) != t.size()) throw std::logic_error("[test] sizes differ");
  if (t.dtype == DType::f64) return be.upload(t, values.data());
  if (t.dtype == DType::f32) return be.upload(t, std::vector<float>(values.begin(), values.end()).data());
  if (t.dtype == DType::i32) return be.upload(t, std::vector<std::int32_t>(values.begin(), values.end()).data());
  throw std::logic_error("[test] dtype");
}

inline std::vector<double> get(Backend& be, Tensor t) {
  std::vector<double> values(static_cast<std::size_t>(t.size()));
  if (t.dtype == DType::f64) {
    be.download(values.data(), t);
  } else if (t.dtype == DType::f32) {
    std::vector<float> narrow(values.size());
    be.download(narrow.data(), t);
    std::copy(narrow.begin(), narrow.end(), values.begin());
  } else if (t.dtype == DType::i32) {
    std::vector<std::int32_t> whole(values.size());
    be.download(whole.data(), t);
    std::copy(whole.begin(), whole.end(), values.begin());
  } else {
    throw std::logic_error("[test] dtype");
  }
  return values;
}

}  // namespace rownorm::testing
