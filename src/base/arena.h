// All memory of a run is planned before any of it is used. The same code builds a run's tensors twice: over a
// measuring arena, which only adds up sizes (all that --dry-run needs), and over one that owns a block of that size.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/tensor.h"

namespace rownorm {

class Arena {
 public:
  static constexpr std::int64_t alignment = 256;  // bytes; a CUDA allocation's, and more than any vector load needs

  Arena() = default;  // measuring: tensors have data == nullptr
  Arena(void* memory, std::int64_t bytes) : base_(static_cast<char*>(memory)), capacity_(bytes) {}

  // A new tensor, counted under `purpose`. std::logic_error when a bound arena is exhausted; Error (exit 5) when the
  // plan does not fit into 63 bits.
  Tensor add(const std::string& purpose, DType dtype, Shape shape);

  std::int64_t bytes() const { return used_; }
  // (purpose, bytes) in order of first use; the bytes include alignment and add up to bytes().
  const std::vector<std::pair<std::string, std::int64_t>>& by_purpose() const { return purposes_; }

 private:
  char* base_ = nullptr;
  std::int64_t capacity_ = INT64_MAX;
  std::int64_t used_ = 0;
  std::vector<std::pair<std::string, std::int64_t>> purposes_;
};

// "activations 12.3 MiB, parameters 8.1 MiB, ... total 30.0 MiB": one line for errors and logs.
std::string describe(const Arena& arena);
std::string human_bytes(std::int64_t bytes);  // "12.3 MiB"

}  // namespace rownorm
