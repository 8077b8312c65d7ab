// The machine's own bounds, measured and not computed: frequency, neighbours and memory are what they are at the
// moment.
#include <omp.h>

#include <algorithm>

#include "ops/cpu/cpu_backend.h"

namespace rownorm::cpu {

namespace {

constexpr Index side = 1024;             // of the products: from here on OpenBLAS gains nothing by larger ones
constexpr Index stream_bytes = 1 << 28;  // more than the caches that two cores of any machine share

}  // namespace

std::int64_t CpuBackend::probe_bytes() const {
  return std::max(stream_bytes, (2 + threads_) * side * side * size_of(DType::f32));
}

// One product a thread, of the same a and b, so that no thread waits for another.
double CpuBackend::probe_products(Tensor memory) {
  const Index size = side * side;
  auto* const a = static_cast<float*>(memory.data);
#pragma omp parallel for schedule(static) num_threads(threads_)
  for (int thread = 0; thread < threads_; ++thread)
    gemm(side, side, side, 1, {a, side}, {a + size, side}, 0, a + (2 + thread) * size, side);
  return 2.0 * static_cast<double>(side) * static_cast<double>(size) * threads_;
}

// x = c x + y: in place, so that the bytes counted are all that move (a store elsewhere would read its lines first).
double CpuBackend::probe_stream(Tensor memory) {
  const Index size = stream_bytes / size_of(DType::f32) / 2;
  auto* const x = static_cast<float*>(memory.data);
  const float* y = x + size;
#pragma omp parallel for simd schedule(static) num_threads(threads_)
  for (Index i = 0; i < size; ++i) x[i] = 0.5f * x[i] + y[i];
  return 3.0 * static_cast<double>(size) * sizeof(float);
}

}  // namespace rownorm::cpu
