// Copies, conversions between dtypes, and filling.
#include <cmath>
#include <type_traits>

#include "cuda/kernel.cuh"

namespace rownorm::cuda {
namespace {

constexpr int threads = 256;

__device__ void convert(double& to, float from) { to = from; }
__device__ void convert(double& to, bf16 from) { to = __bfloat162float(from); }
__device__ void convert(float& to, double from) { to = static_cast<float>(from); }
__device__ void convert(bf16& to, double from) { to = __float2bfloat16_rn(static_cast<float>(from)); }
__device__ void convert(float& to, bf16 from) { to = __bfloat162float(from); }
__device__ void convert(bf16& to, float from) { to = __float2bfloat16_rn(from); }

template <class To, class From>
__global__ void convert_kernel(To* to, const From* from, Index size) {
  GPU_LOOP(i, size) convert(to[i], from[i]);
}

template <class To, class From>
__global__ void convert16_kernel(To* to, const From* from, Index packs) {
  GPU_LOOP(i, packs) {
    float x[8];
    load(x, from + 8 * i);
    store(to + 8 * i, x);
  }
}

template <class T>
__global__ void fill_kernel(T* to, T value, Index size) {
  GPU_LOOP(i, size) to[i] = value;
}

template <class To, class From>
void convert_all(Tensor to, Tensor from, cudaStream_t stream) {
  const Index size = to.size();
  if constexpr (!std::is_same_v<To, double> && !std::is_same_v<From, double>) {
    if (fits16(size, DType::bf16, {to.data, from.data}))
      return check(gpu_launch(convert16_kernel<To, From>, loop_blocks(size / 8, threads), threads, 0, stream,
                              pointer<To>(to), pointer<From>(from), size / 8),
                   "copy");
  }
  check(gpu_launch(convert_kernel<To, From>, loop_blocks(size, threads), threads, 0, stream, pointer<To>(to),
                   pointer<From>(from), size),
        "copy");
}

template <class T>
void fill_all(Tensor t, T value, cudaStream_t stream) {
  check(gpu_launch(fill_kernel<T>, loop_blocks(t.size(), threads), threads, 0, stream, pointer<T>(t), value, t.size()),
        "fill");
}

}  // namespace

// Any kernel will do: all are compiled for the same devices.
bool CudaBackend::has_code() const {
  cudaFuncAttributes attributes{};
  const cudaError_t status = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(fill_kernel<float>));
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction) return false;
  check(status, "cudaFuncGetAttributes");
  return true;
}

void CudaBackend::do_copy(Tensor to, Tensor from) {
  if (to.size() == 0) return;
  if (to.dtype == from.dtype)
    check(cudaMemcpyAsync(to.data, from.data, static_cast<std::size_t>(to.bytes()), cudaMemcpyDeviceToDevice, stream_),
          "copy");
  else if (to.dtype == DType::f64)
    from.dtype == DType::f32 ? convert_all<double, float>(to, from, stream_)
                             : convert_all<double, bf16>(to, from, stream_);
  else if (to.dtype == DType::f32)
    from.dtype == DType::f64 ? convert_all<float, double>(to, from, stream_)
                             : convert_all<float, bf16>(to, from, stream_);
  else
    from.dtype == DType::f64 ? convert_all<bf16, double>(to, from, stream_)
                             : convert_all<bf16, float>(to, from, stream_);
}

void CudaBackend::do_fill(Tensor t, double value) {
  if (t.size() == 0) return;
  if (value == 0 && !std::signbit(value))
    check(cudaMemsetAsync(t.data, 0, static_cast<std::size_t>(t.bytes()), stream_), "fill");
  else if (t.dtype == DType::f64)
    fill_all(t, value, stream_);
  else if (t.dtype == DType::f32)
    fill_all(t, static_cast<float>(value), stream_);
  else if (t.dtype == DType::i32)
    fill_all(t, static_cast<std::int32_t>(value), stream_);
  else
    fill_all(t, __float2bfloat16_rn(static_cast<float>(value)), stream_);
}

}  // namespace rownorm::cuda
