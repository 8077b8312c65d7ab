// Matrix products of row-major matrices by cuBLASLt.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <memory>

#include "base/tensor.h"

namespace rownorm::cuda {

// A matrix, or `count` of them `step` elements apart: rows `stride` elements apart, or the transpose of what is stored.
struct Operand {
  const void* data;
  DType dtype;  // f32 or bf16
  std::int64_t stride;
  bool transposed = false;
  std::int64_t step = 0;
};

struct Result {
  void* data;
  DType dtype;
  std::int64_t stride;
  std::int64_t step = 0;
};

// How f32 operands are multiplied; sums are in f32 whatever they are.
enum class Multiply { f32, tf32 };

class Products {
 public:
  // Everything is enqueued on `stream`. Error (exit 5) when cuBLASLt does not work.
  explicit Products(cudaStream_t stream);
  ~Products();
  Products(const Products&) = delete;
  Products& operator=(const Products&) = delete;

  void set_workspace(void* workspace) { workspace_ = workspace; }  // of products_bytes

  // d(m,n) = alpha a(m,k) b(k,n) + beta c for each of `count`, c of d's dtype and layout, at d when null, and not read
  // when beta is 0. With k = 0 the product is zero. How a shape is computed is chosen once, and adds in a fixed order.
  // Error (exit 5) when cuBLASLt has no way to compute it.
  void multiply(std::int64_t m, std::int64_t n, std::int64_t k, double alpha, const Operand& a, const Operand& b,
                double beta, const Result& d, Multiply how, const void* c = nullptr, std::int64_t count = 1);

 private:
  struct Library;
  std::unique_ptr<Library> library_;
  cudaStream_t stream_;
  void* workspace_ = nullptr;
};

}  // namespace rownorm::cuda
