// The few words in which kernels differ from C++: launches, shared memory, warp reductions, 16-byte accesses and PTX.
// nvcc takes them from here. The same sources are also compiled as C++ for tests/cuda_standin, whose shim, included
// before anything else, defines everything that stands under __CUDACC__ here, with the same results for the whole warp.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#if !defined(__CUDACC__) && !defined(ROWNORM_CUDA_STANDIN)
#error "kernels are compiled by nvcc, or as C++ with the shim of tests/cuda_standin"
#endif

// Shared memory, aligned to 16 bytes. GPU_SHARED(T, name, N): T name[N], N constant, T may be an alias of an array.
// GPU_DYN_SMEM(T, name): T* name, the dynamic shared memory of the launch.
// GPU_ALIGNED(p): p, checked by the stand-in.
#ifdef __CUDACC__
#define GPU_SHARED(T, name, N) __shared__ __align__(16) T name[N]
#define GPU_DYN_SMEM(T, name)                                  \
  extern __shared__ __align__(16) unsigned char gpu_dynamic[]; \
  T* const name = reinterpret_cast<T*>(gpu_dynamic)
#define GPU_ALIGNED(p) (p)
#endif

namespace rownorm {

// The only way to launch. smem: bytes of dynamic shared memory (above 48 KB the kernel needs
// cudaFuncAttributeMaxDynamicSharedMemorySize first). Arguments convert to the kernel's parameters as in a call.
template <class... Parameters, class... Arguments>
[[nodiscard]] cudaError_t gpu_launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, std::size_t smem,
                                     cudaStream_t stream, const Arguments&... arguments) {
#ifdef __CUDACC__
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = smem;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
#else
  return standin::launch(kernel, grid, block, smem, stream, static_cast<Parameters>(arguments)...);
#endif
}

#ifdef __CUDACC__

// ---- PTX. All 32 lanes of a warp reach ldmatrix and mma together.

// d += a b: 16 x 8 over k = 16, bf16 in, fp32 accumulate (mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32).
// With g = lane / 4, t = lane % 4, two bf16 a register, the lower column (a) or row (b) in the low half
// (PTX ISA, "Matrix Fragments for mma.m16n8k16"):
//   a[0] = A[g][2t, 2t+1]      a[1] = A[g+8][2t, 2t+1]      a[2] = A[g][2t+8, 2t+9]    a[3] = A[g+8][2t+8, 2t+9]
//   b[0] = B[2t, 2t+1][g]      b[1] = B[2t+8, 2t+9][g]
//   d[0], d[1] = D[g][2t, 2t+1]                             d[2], d[3] = D[g+8][2t, 2t+1]
__device__ inline void mma_m16n8k16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four 8 x 8 matrices of 16-bit elements from shared memory (ldmatrix.sync.aligned.m8n8.x4.shared.b16). `row` of lane
// 8j + i points to row i of matrix j: 16 bytes, aligned to 16. r[j] of a lane is M_j[g][2t, 2t+1], with _trans
// M_j[2t, 2t+1][g].
__device__ inline void ldmatrix_x4(std::uint32_t (&r)[4], const void* row) {
  const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ inline void ldmatrix_x4_trans(std::uint32_t (&r)[4], const void* row) {
  const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// 16 bytes from global to shared memory, both aligned to 16, zeros where !copy (`global` is then not read)
// (cp.async.cg.shared.global). A wait lets all but the latest N committed groups of this thread arrive; other threads
// see them after a barrier.
__device__ inline void cp_async_16(void* shared, const void* global, bool copy = true) {
  const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(__cvta_generic_to_global(global)),
               "r"(copy ? 16 : 0)
               : "memory");
}

__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int N>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// 2^x to 2 units of the last place (ex2.approx.ftz.f32); 0 for -infinity, for NaN a NaN.
__device__ inline float fast_exp2(float x) {
  asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
  return x;
}

#endif

// ---- 16 bytes of T at once; p is aligned to 16. _stream: used once, so evicted first from the caches.
template <class T>
struct alignas(16) Pack16 {
  static constexpr int size = static_cast<int>(16 / sizeof(T));
  T v[size];
  __host__ __device__ T& operator[](int i) { return v[i]; }
  __host__ __device__ const T& operator[](int i) const { return v[i]; }
};

namespace detail {
template <class To, class From>
__device__ inline To bits16(const From& from) {
  static_assert(sizeof(To) == 16 && sizeof(From) == 16);
  return *reinterpret_cast<const To*>(&from);
}
}  // namespace detail

template <class T>
__device__ inline Pack16<T> load16(const T* p) {
  return detail::bits16<Pack16<T>>(*GPU_ALIGNED(reinterpret_cast<const uint4*>(p)));
}
template <class T>
__device__ inline Pack16<T> load16_stream(const T* p) {
  return detail::bits16<Pack16<T>>(__ldcs(reinterpret_cast<const uint4*>(p)));
}
template <class T>
__device__ inline void store16(T* p, const Pack16<T>& pack) {
  *GPU_ALIGNED(reinterpret_cast<uint4*>(p)) = detail::bits16<uint4>(pack);
}
template <class T>
__device__ inline void store16_stream(T* p, const Pack16<T>& pack) {
  __stcs(reinterpret_cast<uint4*>(p), detail::bits16<uint4>(pack));
}

// ---- Reductions over a whole warp; every lane gets the result. The order is fixed: bit-equal in every run.
__device__ inline float warp_sum(float x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

__device__ inline float warp_max(float x) {
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

}  // namespace rownorm
