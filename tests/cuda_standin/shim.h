// Included before everything else (-include) where the sources of cuda/ are compiled as C++: the device side of CUDA on
// the CPU. Runtime calls come from NVIDIA's own headers and are implemented by the library (runtime.cpp, cublaslt.cpp).
// Semantics follow the CUDA C++ Programming Guide ("C++ Language Extensions") and, for the PTX wrappers of
// cuda/gpu.cuh, the PTX ISA. What goes against them ends the process with one line: stop().
#pragma once
#define ROWNORM_CUDA_STANDIN 1

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <device_launch_parameters.h>  // threadIdx and its kin

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__

#define GPU_SHARED(T, name, N)                       \
  T(&name)                                           \
  [N] = *static_cast<T(*)[N]>(standin::shared_array( \
      [] {                                           \
        static const char key = 0;                   \
        return static_cast<const void*>(&key);       \
      }(),                                           \
      sizeof(T[N])))
#define GPU_DYN_SMEM(T, name) T* const name = static_cast<T*>(standin::dynamic_shared())
#define GPU_ALIGNED(p) standin::aligned(p)

namespace standin {

[[noreturn, gnu::format(printf, 1, 2)]] void stop(const char* format, ...);

// ---- Launches
struct Launch {
  const void* kernel;
  dim3 grid, block;
  std::size_t smem;
  std::function<void()> body;  // what each thread runs
};
cudaError_t enqueue(Launch launch, cudaStream_t stream);
// What a kernel may be given: null, device or pinned memory. A struct is searched for addresses of host memory.
void check_pointer(const void* p, int parameter);
void check_words(const void* bytes, std::size_t size, int parameter);

template <class T>
void check_parameter(const T& value, int parameter) {
  if constexpr (std::is_pointer_v<T> && !std::is_function_v<std::remove_pointer_t<T>>)
    check_pointer(static_cast<const void*>(value), parameter);
  else if constexpr (std::is_class_v<T>)
    check_words(&value, sizeof value, parameter);
}

template <class... Parameters>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, std::size_t smem, cudaStream_t stream,
                   std::type_identity_t<Parameters>... arguments) {
  static_assert((std::is_trivially_copyable_v<Parameters> && ...), "kernels take plain values");
  [[maybe_unused]] int parameter = 0;
  (check_parameter(arguments, ++parameter), ...);
  return enqueue({reinterpret_cast<const void*>(kernel), grid, block, smem, [=] { kernel(arguments...); }}, stream);
}

// ---- Inside a kernel
void* shared_array(const void* key, std::size_t bytes);  // this block's array of that declaration
void* dynamic_shared();

enum class Vote { none, count, all, any };
int barrier(Vote vote, int predicate, const char* file, int line);
void fence();

// A collective of the lanes in `mask`. It waits until all of them that have not exited have made the same call, and
// then computes every lane's result.
enum class Collective {
  sync,
  shuffle,
  shuffle_up,
  shuffle_down,
  shuffle_xor,
  ballot,
  any,
  all,
  add,
  min,
  max,
  mma,
  ldmatrix,
  ldmatrix_trans
};
struct WarpCall {
  Collective kind;
  std::uint32_t mask;
  const char* file;
  int line;
  std::uint64_t value = 0;  // operand, then result
  int lane = 0, width = 32;
  bool is_signed = false;
  float* d = nullptr;  // mma
  const std::uint32_t *a = nullptr, *b = nullptr;
  std::uint32_t row[4] = {}, *r = nullptr;  // ldmatrix
};
void warp(WarpCall& call);

// Copies that have been issued but not made: queued in late mode.
struct Copy {
  void* shared;
  const void* global;  // null: zeros
};
bool late_copies();
void queue_copy(const Copy& copy);
void commit_copies();
bool dropped(const char* file, int line);     // Mode::drop_line
bool next_copy(int groups_left, Copy& copy);  // one that must have arrived before a wait returns
void check_copy(const void* shared, const void* global);

template <class T>
T* aligned(T* p) {
  if (reinterpret_cast<std::uintptr_t>(p) % alignof(T) != 0)
    stop("access of %zu bytes at %p, which is not aligned to %zu", sizeof(T), static_cast<const volatile void*>(p),
         alignof(T));
  return p;
}

template <class T>
T shuffle(Collective kind, std::uint32_t mask, T value, int lane, int width, const char* file, int line) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  WarpCall call{kind, mask, file, line};
  std::memcpy(&call.value, &value, sizeof value);
  call.lane = lane;
  call.width = width;
  warp(call);
  std::memcpy(static_cast<void*>(&value), &call.value, sizeof value);
  return value;
}

inline std::uint64_t collect(Collective kind, std::uint32_t mask, std::uint64_t value, bool is_signed, const char* file,
                             int line) {
  WarpCall call{kind, mask, file, line};
  call.value = value;
  call.is_signed = is_signed;
  warp(call);
  return call.value;
}

}  // namespace standin

#define STANDIN_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

// ---- Barriers, votes, shuffles
inline void __syncthreads(STANDIN_HERE) { standin::barrier(standin::Vote::none, 0, file, line); }
inline int __syncthreads_count(int p, STANDIN_HERE) { return standin::barrier(standin::Vote::count, p, file, line); }
inline int __syncthreads_and(int p, STANDIN_HERE) { return standin::barrier(standin::Vote::all, p, file, line); }
inline int __syncthreads_or(int p, STANDIN_HERE) { return standin::barrier(standin::Vote::any, p, file, line); }
inline void __syncwarp(unsigned mask = 0xffffffffu, STANDIN_HERE) {
  standin::collect(standin::Collective::sync, mask, 0, false, file, line);
}
inline void __threadfence() { standin::fence(); }
inline void __threadfence_block() { standin::fence(); }

template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32, STANDIN_HERE) {
  return standin::shuffle(standin::Collective::shuffle, mask, value, lane, width, file, line);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, STANDIN_HERE) {
  return standin::shuffle(standin::Collective::shuffle_up, mask, value, static_cast<int>(delta), width, file, line);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, STANDIN_HERE) {
  return standin::shuffle(standin::Collective::shuffle_down, mask, value, static_cast<int>(delta), width, file, line);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, STANDIN_HERE) {
  return standin::shuffle(standin::Collective::shuffle_xor, mask, value, lanes, width, file, line);
}
inline unsigned __ballot_sync(unsigned mask, int p, STANDIN_HERE) {
  return static_cast<unsigned>(standin::collect(standin::Collective::ballot, mask, p != 0, false, file, line));
}
inline int __any_sync(unsigned mask, int p, STANDIN_HERE) {
  return static_cast<int>(standin::collect(standin::Collective::any, mask, p != 0, false, file, line));
}
inline int __all_sync(unsigned mask, int p, STANDIN_HERE) {
  return static_cast<int>(standin::collect(standin::Collective::all, mask, p != 0, false, file, line));
}
#define STANDIN_REDUCE(name, kind)                                                                            \
  inline unsigned name(unsigned mask, unsigned x, STANDIN_HERE) {                                             \
    return static_cast<unsigned>(standin::collect(standin::Collective::kind, mask, x, false, file, line));    \
  }                                                                                                           \
  inline int name(unsigned mask, int x, STANDIN_HERE) {                                                       \
    return static_cast<int>(standin::collect(standin::Collective::kind, mask,                                 \
                                             static_cast<std::uint64_t>(std::int64_t{x}), true, file, line)); \
  }
STANDIN_REDUCE(__reduce_add_sync, add)
STANDIN_REDUCE(__reduce_min_sync, min)
STANDIN_REDUCE(__reduce_max_sync, max)
#undef STANDIN_REDUCE

// ---- Atomics: relaxed, so that they order nothing else
#define STANDIN_ATOMIC(name, expression)                        \
  template <class T>                                            \
  T name(T* p, std::type_identity_t<T> x) {                     \
    T old;                                                      \
    __atomic_load(standin::aligned(p), &old, __ATOMIC_RELAXED); \
    T set = static_cast<T>(expression);                         \
    __atomic_store(p, &set, __ATOMIC_RELAXED);                  \
    return old;                                                 \
  }
STANDIN_ATOMIC(atomicAdd, old + x)
STANDIN_ATOMIC(atomicMin, x < old ? x : old)
STANDIN_ATOMIC(atomicMax, x > old ? x : old)
STANDIN_ATOMIC(atomicExch, x)
STANDIN_ATOMIC(atomicAnd, old& x)
STANDIN_ATOMIC(atomicOr, old | x)
#undef STANDIN_ATOMIC
template <class T>
T atomicCAS(T* p, std::type_identity_t<T> compare, std::type_identity_t<T> x) {
  T old;
  __atomic_load(standin::aligned(p), &old, __ATOMIC_RELAXED);
  T set = old == compare ? x : old;
  __atomic_store(p, &set, __ATOMIC_RELAXED);
  return old;
}

// ---- Loads and stores with cache hints
// clang-format off
template <class T> T __ldg(const T* p) { return *standin::aligned(p); }
template <class T> T __ldcs(const T* p) { return *standin::aligned(p); }
template <class T> T __ldca(const T* p) { return *standin::aligned(p); }
template <class T> T __ldcg(const T* p) { return *standin::aligned(p); }
template <class T> void __stcs(T* p, std::type_identity_t<T> x) { *standin::aligned(p) = x; }
template <class T> void __stcg(T* p, std::type_identity_t<T> x) { *standin::aligned(p) = x; }
template <class T> void __stwt(T* p, std::type_identity_t<T> x) { *standin::aligned(p) = x; }

// ---- Arithmetic. min and max of floats drop a NaN, as on the device.
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
template <class A, class B, class = std::enable_if_t<std::is_integral_v<A> && std::is_integral_v<B>>>
std::common_type_t<A, B> min(A a, B b) { using T = std::common_type_t<A, B>; return T(a) < T(b) ? T(a) : T(b); }
template <class A, class B, class = std::enable_if_t<std::is_integral_v<A> && std::is_integral_v<B>>>
std::common_type_t<A, B> max(A a, B b) { using T = std::common_type_t<A, B>; return T(a) > T(b) ? T(a) : T(b); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float fdividef(float a, float b) { return a / b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return static_cast<float>(1.0 / sqrt(static_cast<double>(x))); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __saturatef(float x) { return fminf(fmaxf(x, 0.0f), 1.0f); }  // NaN gives 0
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline long long __double_as_longlong(double x) { return std::bit_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return std::bit_cast<double>(x); }
inline int __float2int_rn(float x) { return static_cast<int>(nearbyintf(x)); }
inline int __float2int_rd(float x) { return static_cast<int>(floorf(x)); }
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return std::countl_zero(static_cast<unsigned long long>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(std::uint64_t{a} * b >> 32); }
[[noreturn]] inline void __trap() { standin::stop("__trap()"); }
// clang-format on

namespace rownorm {

// ---- The wrappers of cuda/gpu.cuh, where they are described
inline void mma_m16n8k16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2], STANDIN_HERE) {
  standin::WarpCall call{standin::Collective::mma, 0xffffffffu, file, line};
  call.d = d;
  call.a = a;
  call.b = b;
  standin::warp(call);
}

// Each lane reads its own row, so that the sanitizers see the access of the thread that makes it.
inline void ldmatrix(standin::Collective kind, std::uint32_t (&r)[4], const void* row, const char* file, int line) {
  standin::WarpCall call{kind, 0xffffffffu, file, line};
  const uint4 words = *standin::aligned(static_cast<const uint4*>(row));
  std::memcpy(call.row, &words, sizeof words);
  call.r = r;
  standin::warp(call);
}
inline void ldmatrix_x4(std::uint32_t (&r)[4], const void* row, STANDIN_HERE) {
  ldmatrix(standin::Collective::ldmatrix, r, row, file, line);
}
inline void ldmatrix_x4_trans(std::uint32_t (&r)[4], const void* row, STANDIN_HERE) {
  ldmatrix(standin::Collective::ldmatrix_trans, r, row, file, line);
}

inline float fast_exp2(float x) { return exp2f(x); }

inline void make_copy(const standin::Copy& copy) {
  *static_cast<uint4*>(copy.shared) = copy.global == nullptr ? uint4{} : *static_cast<const uint4*>(copy.global);
}
inline void cp_async_16(void* shared, const void* global, bool copy = true) {
  standin::check_copy(shared, copy ? global : nullptr);
  const standin::Copy made{shared, copy ? global : nullptr};
  if (standin::late_copies())
    standin::queue_copy(made);
  else
    make_copy(made);
}
inline void cp_async_commit() { standin::commit_copies(); }
template <int N>
void cp_async_wait(STANDIN_HERE) {
  if (standin::dropped(file, line)) return;
  for (standin::Copy copy{}; standin::next_copy(N, copy);) make_copy(copy);
}

}  // namespace rownorm
