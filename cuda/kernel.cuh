// What the kernels share: elements of any dtype as floats, several at once where rows allow, sums over a block, and how
// a kernel's instance and grid are chosen.
#pragma once
#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "base/tensor.h"
#include "cuda/backend.h"
#include "cuda/gpu.cuh"

namespace rownorm::cuda {

using bf16 = __nv_bfloat16;

template <class T>
T* pointer(Tensor t) {
  return static_cast<T*>(t.data);
}

// ---- elements: f32 or bf16 in memory, f32 in registers; bf16 is rounded to nearest even ----

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bf16 x) { return __bfloat162float(x); }

template <class T>
__device__ T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}
template <>
__device__ inline bf16 from_float<bf16>(float x) {
  return __float2bfloat16_rn(x);
}

// W elements at p: one, or as many whole packs of 16 bytes, to which p is then aligned.
template <int W, class T>
__device__ inline void load(float (&x)[W], const T* p) {
  if constexpr (W == 1) {
    x[0] = to_float(*p);
  } else {
    constexpr int size = Pack16<T>::size;
    static_assert(W % size == 0);
    for (int i = 0; i < W; i += size) {
      const Pack16<T> pack = load16(p + i);
      for (int j = 0; j < size; ++j) x[i + j] = to_float(pack[j]);
    }
  }
}

template <int W, class T>
__device__ inline void store(T* p, const float (&x)[W]) {
  if constexpr (W == 1) {
    *p = from_float<T>(x[0]);
  } else {
    constexpr int size = Pack16<T>::size;
    static_assert(W % size == 0);
    for (int i = 0; i < W; i += size) {
      Pack16<T> pack;
      for (int j = 0; j < size; ++j) pack[j] = from_float<T>(x[i + j]);
      store16(p + i, pack);
    }
  }
}

// ---- sums; the order is fixed ----

__device__ inline double warp_sum(double x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}
using rownorm::warp_sum;

// Over a block of whole warps; the result is every thread's. All threads call it, and may call it again at once.
__device__ inline double block_sum(double x) {
  GPU_SHARED(double, parts, 32);
  x = warp_sum(x);
  __syncthreads();  // whoever still reads the parts of a call before
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  double sum = 0;
  for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) sum += parts[warp];
  return sum;
}

// Before a loop over an array that is to stay in registers; before one that is to take few of them.
#ifdef __CUDACC__
#define GPU_UNROLL _Pragma("unroll")
#define GPU_NO_UNROLL _Pragma("unroll 1")
#else
#define GPU_UNROLL
#define GPU_NO_UNROLL
#endif

// ---- launching ----

// Whether rows of `width` elements, from each of the pointers on, can be read 16 bytes at a time.
inline bool fits16(Index width, DType narrowest, std::initializer_list<const void*> pointers) {
  return width % (16 / size_of(narrowest)) == 0 && std::all_of(pointers.begin(), pointers.end(), [](const void* p) {
           return reinterpret_cast<std::uintptr_t>(p) % 16 == 0;
         });
}

// Calls launch<T, W>() with T what holds `dtype` and W as many elements of it as 16 bytes hold, or 1.
template <class Launch>
void for_elements(DType dtype, bool fits, Launch launch) {
  if (dtype == DType::bf16) {
    fits ? launch.template operator()<bf16, 8>() : launch.template operator()<bf16, 1>();
  } else {
    fits ? launch.template operator()<float, 4>() : launch.template operator()<float, 1>();
  }
}

// Blocks for `count` items, `each` of them a block.
inline unsigned ceil_div(Index count, Index each) { return grid_size((count + each - 1) / each); }

// Blocks of a loop over `count` items by a stride of the whole grid: enough to fill any device.
inline unsigned loop_blocks(Index count, Index threads) {
  return static_cast<unsigned>(std::min<Index>((count + threads - 1) / threads, 4096));
}
#define GPU_LOOP(i, count)                                                               \
  for (Index i = static_cast<Index>(blockIdx.x) * blockDim.x + threadIdx.x; i < (count); \
       i += static_cast<Index>(gridDim.x) * blockDim.x)

}  // namespace rownorm::cuda
