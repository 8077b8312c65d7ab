// The device's own bounds, for rownorm bench: one large product, and a stream through more memory than any L2 holds.
#include "cuda/kernel.cuh"

namespace rownorm::cuda {
namespace {

constexpr int threads = 256;

// Uniform in (-1, 1), of element i: a product of zeros takes less power, so that the clock would be higher than in a
// run. (A bijection of 32 bits that mixes them, the finalizer of MurmurHash3.)
template <class T>
__global__ void uniform_kernel(T* to, Index size) {
  GPU_LOOP(i, size) {
    auto bits = static_cast<std::uint32_t>(i);
    bits = (bits ^ bits >> 16) * 0x85ebca6bU;
    bits = (bits ^ bits >> 13) * 0xc2b2ae35U;
    to[i] = from_float<T>(static_cast<float>(static_cast<std::int32_t>(bits ^ bits >> 16)) * 0x1p-31f);
  }
}

__global__ void stream_kernel(float* to, const float* from, Index packs) {
  GPU_LOOP(i, packs) store16_stream(to + 4 * i, load16_stream(from + 4 * i));
}

// Of the square matrices: the operands fill at most the first half of the scratch, the result lies in the second.
Index side_in(Index bytes, DType compute) {
  Index side = 8192;  // from here on larger products are no faster
  while (side > 16 && 4 * side * side * size_of(compute) > bytes) side /= 2;
  return side;
}

}  // namespace

// 1 GiB, eight times the largest L2 of today's devices; less where it would be more than a 64th of the device.
Index CudaBackend::probe_bytes() const {
  const auto part = static_cast<Index>(properties_.totalGlobalMem) / 64;
  return std::clamp<Index>(part / 4096 * 4096, 4096, Index{1} << 30);
}

void CudaBackend::prepare_probes(Tensor scratch) {
  const Index half = scratch.bytes() / 2, size = half / size_of(compute_);
  for_elements(compute_, false, [&]<class T, int>() {
    check(gpu_launch(uniform_kernel<T>, loop_blocks(size, threads), threads, 0, stream_, pointer<T>(scratch), size),
          "probe");
  });
}

double CudaBackend::probe_products(Tensor scratch) {
  const Index half = scratch.bytes() / 2, side = side_in(scratch.bytes(), compute_);
  char* const first = pointer<char>(scratch);
  products_->multiply(side, side, side, 1, {first, compute_, side},
                      {first + side * side * size_of(compute_), compute_, side, true}, 0,
                      {first + half, compute_, side}, multiply_);
  return 2.0 * static_cast<double>(side) * static_cast<double>(side) * static_cast<double>(side);
}

// The second half becomes the first.
double CudaBackend::probe_stream(Tensor scratch) {
  const Index half = scratch.bytes() / 2, packs = half / 16;
  float* const first = pointer<float>(scratch);
  check(gpu_launch(stream_kernel, loop_blocks(packs, threads), threads, 0, stream_, first + half / 4, first, packs),
        "probe");
  return 2.0 * static_cast<double>(half);
}

}  // namespace rownorm::cuda
