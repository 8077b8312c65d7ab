// Numbers as integers of the same order and back.
#include <limits>
#include <type_traits>

#include "cuda/kernel.cuh"
#include "cuda/ordered.h"

namespace rownorm::cuda {
namespace {

constexpr int threads = 256;

// IEEE 754: positive numbers are ordered as their bits are, negative ones the other way round; infinities are the last
// before the NaNs, among whose bits the largest and the smallest integer are.
template <class Int>
__host__ __device__ Int flip(Int bits) {
  constexpr Int magnitude = static_cast<Int>(~std::make_unsigned_t<Int>{0} >> 1);
  return bits < 0 ? bits ^ magnitude : bits;
}

template <class Int, class Real>
__global__ void to_ordered_kernel(Int* bits, Int nan, Index size) {
  GPU_LOOP(i, size) {
    const Real x = reinterpret_cast<const Real*>(bits)[i];
    bits[i] = x != x ? nan : flip(bits[i]);
  }
}

template <class Int>
__global__ void from_ordered_kernel(Int* bits, Index size) {
  GPU_LOOP(i, size) bits[i] = flip(bits[i]);
}

}  // namespace

void to_ordered(Tensor t, bool nan_last, cudaStream_t stream) {
  const auto launch = [&]<class Int, class Real>() {
    using Limits = std::numeric_limits<Int>;
    check(gpu_launch(to_ordered_kernel<Int, Real>, loop_blocks(t.size(), threads), threads, 0, stream, pointer<Int>(t),
                     nan_last ? Limits::max() : Limits::min(), t.size()),
          "to_ordered");
  };
  t.dtype == DType::f64 ? launch.template operator()<long long, double>() : launch.template operator()<int, float>();
}

void from_ordered(Tensor t, cudaStream_t stream) {
  const auto launch = [&]<class Int>() {
    check(gpu_launch(from_ordered_kernel<Int>, loop_blocks(t.size(), threads), threads, 0, stream, pointer<Int>(t),
                     t.size()),
          "from_ordered");
  };
  t.dtype == DType::f64 ? launch.template operator()<long long>() : launch.template operator()<int>();
}

}  // namespace rownorm::cuda
