// Planted faults. Each is a small kernel or host sequence with one line right or wrong; each right version must pass in
// every mode, and each fault must be caught by those modes of this build that the table names: a wrong value or an
// error code, a check of the stand-in, AddressSanitizer or UBSan, ThreadSanitizer. The table is printed and stands in
// docs/gpu.md.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/gpu.cuh"
#include "support.h"

#if defined(__SANITIZE_ADDRESS__)
constexpr const char* build = "asan";
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
constexpr const char* build = "tsan";
extern "C" const char* __tsan_default_options();  // the first report ends the process
extern "C" const char* __tsan_default_options() { return "halt_on_error=1:atexit_sleep_ms=0"; }
#else
constexpr const char* build = "plain";
#endif
#else
constexpr const char* build = "plain";
#endif

namespace rownorm {
namespace {

using namespace standin_test;
using Floats = std::vector<float>;

constexpr unsigned all = 0xffffffffu;

// Each fault returns whether the numbers are right; an error code throws.
struct Fault {
  const char* name;
  bool (*right)();
  bool (*wrong)();
  const char* caught_by;  // of plain, asan, tsan: those that must catch it
};

Floats count(std::size_t n) {
  Floats x(n);
  for (std::size_t i = 0; i < n; ++i) x[i] = static_cast<float>(i + 1);
  return x;
}

// Runs kernel(out, in): 64 threads, `blocks` blocks.
bool run(void (*kernel)(float*, const float*), const Floats& in, const Floats& expected, unsigned blocks = 1) {
  const Device<float> d(in), out(expected.size());
  ok(gpu_launch(kernel, blocks, 64, 0, nullptr, out, d));
  return out.host() == expected;
}

Floats reversed(std::size_t n) {
  const Floats x = count(n);
  return {x.rbegin(), x.rend()};
}

// ---- Barriers
template <bool fault>
__global__ void no_barrier(float* out, const float* in) {
  GPU_SHARED(float, s, 64);
  s[threadIdx.x] = in[threadIdx.x];
  if (!fault) __syncthreads();
  out[threadIdx.x] = s[63 - threadIdx.x];
}
template <bool fault>
bool test_no_barrier() {
  return run(no_barrier<fault>, count(64), reversed(64));
}

template <bool fault>
__global__ void no_barrier_before_reuse(float* out, const float* in) {
  GPU_SHARED(float, s, 64);
  for (int tile = 0; tile < 3; ++tile) {
    s[threadIdx.x] = in[64 * tile + static_cast<int>(threadIdx.x)];
    __syncthreads();
    out[64 * tile + static_cast<int>(threadIdx.x)] = s[63 - threadIdx.x];
    if (!fault) __syncthreads();
  }
}
template <bool fault>
bool test_no_barrier_before_reuse() {
  Floats expected;
  const Floats x = count(192);
  for (std::size_t i = 0; i < 192; ++i) expected.push_back(x[i / 64 * 64 + 63 - i % 64]);
  return run(no_barrier_before_reuse<fault>, x, expected);
}

__device__ float block_sum(float x, float* partial, bool last_barrier) {
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
  __syncthreads();
  const float sum = partial[0] + partial[1];
  if (last_barrier) __syncthreads();
  return sum;
}
template <bool fault>
__global__ void no_barrier_between_reductions(float* out, const float* in) {
  GPU_SHARED(float, partial, 2);
  const float sum = block_sum(in[threadIdx.x], partial, !fault);
  out[threadIdx.x] = sum + block_sum(2.0f * in[threadIdx.x], partial, true);
}
template <bool fault>
bool test_no_barrier_between_reductions() {
  return run(no_barrier_between_reductions<fault>, count(64), Floats(64, 3.0f * 2080.0f));
}

template <bool fault>
__global__ void no_syncwarp(float* out, const float* in) {
  GPU_SHARED(float, s, 64);
  s[threadIdx.x] = in[threadIdx.x];
  if (!fault) __syncwarp();
  out[threadIdx.x] = s[threadIdx.x ^ 1];
}
Floats swapped() {
  Floats x = count(64);
  for (std::size_t i = 0; i < 64; i += 2) std::swap(x[i], x[i + 1]);
  return x;
}
template <bool fault>
bool test_no_syncwarp() {
  return run(no_syncwarp<fault>, count(64), swapped());
}

template <bool fault>
__global__ void shuffle_as_barrier(float* out, const float* in) {  // a shuffle orders no memory
  GPU_SHARED(float, s, 64);
  s[threadIdx.x] = in[threadIdx.x];
  const float zero = 0.0f * __shfl_xor_sync(all, in[threadIdx.x], 1);
  if (!fault) __syncwarp();
  out[threadIdx.x] = s[threadIdx.x ^ 1] + zero;
}
template <bool fault>
bool test_shuffle_as_barrier() {
  return run(shuffle_as_barrier<fault>, count(64), swapped());
}

template <bool fault>
__global__ void warp_barrier_for_block(float* out, const float* in) {
  GPU_SHARED(float, s, 64);
  s[threadIdx.x] = in[threadIdx.x];
  if (fault)
    __syncwarp();
  else
    __syncthreads();
  out[threadIdx.x] = s[63 - threadIdx.x];
}
template <bool fault>
bool test_warp_barrier_for_block() {
  return run(warp_barrier_for_block<fault>, count(64), reversed(64));
}

template <bool fault>
__global__ void divergent_barrier(float* out, const float* in) {
  GPU_SHARED(float, s, 64);
  s[threadIdx.x] = in[threadIdx.x];
  if (!fault || threadIdx.x < 32) __syncthreads();
  const float x = s[threadIdx.x / 32 * 32 + 31 - threadIdx.x % 32];
  __syncthreads();
  out[threadIdx.x] = x;
}
template <bool fault>
bool test_divergent_barrier() {
  Floats expected;
  for (int i = 0; i < 64; ++i) expected.push_back(static_cast<float>(i / 32 * 32 + 32 - i % 32));
  return run(divergent_barrier<fault>, count(64), expected);
}

template <bool fault>
__global__ void barrier_in_uneven_loop(float* out, const float* in) {
  GPU_SHARED(float, s, 64);
  float sum = 0.0f;
  const int rounds = fault ? 1 + static_cast<int>(threadIdx.x) / 32 : 2;
  for (int round = 0; round < rounds; ++round) {
    s[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    sum += s[63 - threadIdx.x];
    __syncthreads();
  }
  __syncthreads();
  out[threadIdx.x] = rounds == 2 ? sum / 2.0f : sum;
}
template <bool fault>
bool test_barrier_in_uneven_loop() {
  return run(barrier_in_uneven_loop<fault>, count(64), reversed(64));
}

template <bool fault>
__global__ void two_writers(float* out, const float* in) {
  GPU_SHARED(float, s, 1);
  if (threadIdx.x == 7 || (fault && threadIdx.x == 50)) s[0] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = s[0];
}
template <bool fault>
bool test_two_writers() {
  return run(two_writers<fault>, count(64), Floats(64, 8.0f));
}

template <bool fault>
__global__ void count_without_atomic(float* out, const float* in) {
  GPU_SHARED(int, n, 1);
  if (threadIdx.x == 0) n[0] = 0;
  __syncthreads();
  if (in[threadIdx.x] > 10.0f) {
    if (fault)
      n[0] += 1;
    else
      atomicAdd(n, 1);
  }
  __syncthreads();
  out[threadIdx.x] = static_cast<float>(n[0]);
}
template <bool fault>
bool test_count_without_atomic() {
  return run(count_without_atomic<fault>, count(64), Floats(64, 54.0f));
}

// ---- Bounds
template <bool fault>
__global__ void shared_write_past_end(float* out, const float* in) {
  GPU_SHARED(float, s, 64);
  s[threadIdx.x + (fault ? 1 : 0)] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = in[63 - threadIdx.x];
}
template <bool fault>
bool test_shared_write_past_end() {
  return run(shared_write_past_end<fault>, count(64), reversed(64));
}

template <bool fault>
__global__ void shared_read_past_end(float* out, const float* in) {
  GPU_SHARED(float, s, 64);
  s[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = s[(fault ? 64 : 63) - threadIdx.x];
}
template <bool fault>
bool test_shared_read_past_end() {
  return run(shared_read_past_end<fault>, count(64), reversed(64));
}

template <bool fault>
__global__ void dynamic_past_end(float* out, const float* in) {
  GPU_DYN_SMEM(float, s);
  s[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = s[63 - threadIdx.x];
}
template <bool fault>
bool test_dynamic_past_end() {
  const Device<float> d(count(64)), out(64);
  ok(gpu_launch(dynamic_past_end<fault>, 1, 64, fault ? 252 : 256, nullptr, out, d));
  return out.host() == reversed(64);
}

template <bool fault>
__global__ void no_tail_check(float* out, const float* in) {
  const unsigned i = 64 * blockIdx.x + threadIdx.x;
  if (fault || i < 100) out[i] = in[min(i, 99u)];
}
template <bool fault>
bool test_no_tail_check() {
  return run(no_tail_check<fault>, count(100), count(100), 2);
}

template <bool fault>
__global__ void tail_left_out(float* out, const float* in) {
  const unsigned i = 64 * blockIdx.x + threadIdx.x;
  if (i < (fault ? 64u : 100u)) out[i] = in[i];
}
template <bool fault>
bool test_tail_left_out() {
  return run(tail_left_out<fault>, count(100), count(100), 2);
}

template <bool fault>
__global__ void write_before_start(float* out, const float* in) {
  out[threadIdx.x] = in[threadIdx.x];
  if (fault && threadIdx.x == 0) out[-1] = 0.0f;
}
template <bool fault>
bool test_write_before_start() {
  return run(write_before_start<fault>, count(64), count(64));
}

template <bool fault>
__global__ void global_read_past_end(float* out, const float* in) {
  out[threadIdx.x] = threadIdx.x < 63 ? in[threadIdx.x + 1] : fault ? in[threadIdx.x + 1] : 0.0f;
}
template <bool fault>
bool test_global_read_past_end() {
  Floats expected = count(64);
  expected.erase(expected.begin());
  expected.push_back(0.0f);
  return run(global_read_past_end<fault>, count(64), expected);
}

template <bool fault>
__global__ void unused_read_past_end(float* out, const float* in) {  // masked afterwards, as in a padded tile
  const volatile float* p = in + threadIdx.x + 1;
  const float x = fault || threadIdx.x < 63 ? *p : 0.0f;
  out[threadIdx.x] = threadIdx.x < 63 ? x - 1.0f : 64.0f;
}
template <bool fault>
bool test_unused_read_past_end() {
  return run(unused_read_past_end<fault>, count(64), count(64));
}

template <bool fault>
__global__ void index_of_32_bits(float* x, int row, int d) {
  if (fault)
    x[row * d] = 5.0f;
  else
    x[static_cast<std::size_t>(row) * static_cast<std::size_t>(d)] = 5.0f;
}
template <bool fault>
bool test_index_of_32_bits() {
  const std::size_t row = 70000, d = 32768;  // 2.3e9 floats, of which one page is touched
  const Device<float> x((row + 1) * d);
  ok(gpu_launch(index_of_32_bits<fault>, 1, 1, 0, nullptr, x, static_cast<int>(row), static_cast<int>(d)));
  float y = 0.0f;
  ok(cudaMemcpy(&y, x + row * d, sizeof y, cudaMemcpyDeviceToHost));
  return y == 5.0f;
}

template <bool fault>
bool test_copy_past_end() {
  const Device<float> d(count(64));
  Floats x(65);
  ok(cudaMemcpy(x.data(), d, (fault ? 65 : 64) * sizeof(float), cudaMemcpyDeviceToHost));
  return x[63] == 64.0f;
}

// ---- Memory that nobody has written
template <bool fault>
__global__ void shared_sum_not_zeroed(float* out, const float* in) {
  GPU_SHARED(float, s, 64);
  if (!fault) s[threadIdx.x] = 0.0f;
  s[threadIdx.x] += in[threadIdx.x];
  out[threadIdx.x] = s[threadIdx.x];
}
template <bool fault>
bool test_shared_sum_not_zeroed() {
  return run(shared_sum_not_zeroed<fault>, count(64), count(64));
}

template <bool fault>
__global__ void accumulate(float* out, const float* in) {
  out[threadIdx.x] += in[threadIdx.x];
}
template <bool fault>
bool test_device_sum_not_zeroed() {
  const Device<float> d(count(64)), out(64);
  if (!fault) ok(cudaMemset(out, 0, 64 * sizeof(float)));
  ok(gpu_launch(accumulate<fault>, 1, 64, 0, nullptr, out, d));
  return out.host() == count(64);
}

template <bool fault>
__global__ void maximum_of_unwritten(float* out, const float* in) {  // fmaxf drops the NaN
  GPU_SHARED(float, s, 128);
  s[threadIdx.x] = in[threadIdx.x];
  if (!fault) s[64 + threadIdx.x] = -INFINITY;
  __syncthreads();
  float most = -INFINITY;
  for (int i = 0; i < 128; ++i) most = fmaxf(most, s[i]);
  out[threadIdx.x] = most;
}
template <bool fault>
bool test_maximum_of_unwritten() {
  return run(maximum_of_unwritten<fault>, count(64), Floats(64, 64.0f));
}

template <bool fault>
__global__ void minimum_of_unwritten(float* out, const float* in) {
  GPU_SHARED(float, s, 128);
  s[threadIdx.x] = in[threadIdx.x];
  if (!fault) s[64 + threadIdx.x] = INFINITY;
  __syncthreads();
  float least = INFINITY;
  for (int i = 0; i < 128; ++i) least = fminf(least, s[i]);
  out[threadIdx.x] = least;
}
template <bool fault>
bool test_minimum_of_unwritten() {
  return run(minimum_of_unwritten<fault>, count(64), Floats(64, 1.0f));
}

// ---- cp.async
enum class Async { right, no_wait, wait_leaves_one, no_commit, no_barrier };
template <Async fault>
__global__ void pipeline(float* out, const float* in) {
  GPU_SHARED(float, s, 2 * 256);
  const auto issue = [&](int tile) {
    cp_async_16(s + tile % 2 * 256 + 4 * threadIdx.x, in + tile * 256 + 4 * static_cast<int>(threadIdx.x));
    if (fault != Async::no_commit) cp_async_commit();
  };
  issue(0);
  for (int tile = 0; tile < 3; ++tile) {
    if (tile < 2) issue(tile + 1);
    if (tile < 2 || fault == Async::wait_leaves_one)
      cp_async_wait<1>();
    else if (fault != Async::no_wait)
      cp_async_wait<0>();
    if (fault != Async::no_barrier) __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < 256; i += 64) out[tile * 256 + i] = s[tile % 2 * 256 + 255 - i];
    __syncthreads();
  }
}
template <Async fault>
bool test_pipeline() {
  Floats expected;
  for (int i = 0; i < 768; ++i) expected.push_back(static_cast<float>(i / 256 * 256 + 256 - i % 256));
  return run(pipeline<fault>, count(768), expected);
}

template <bool fault>
__global__ void misaligned_copy(float* out, const float* in) {
  GPU_SHARED(float, s, 256);
  cp_async_16(s + 4 * threadIdx.x, in + (fault ? 1 : 4) + 4 * threadIdx.x);
  cp_async_commit();
  cp_async_wait<0>();
  out[threadIdx.x] = s[4 * threadIdx.x + (fault ? 3 : 0)];
}
template <bool fault>
bool test_misaligned_copy() {
  Floats expected;
  for (int i = 0; i < 64; ++i) expected.push_back(static_cast<float>(4 * i + 5));
  return run(misaligned_copy<fault>, count(260), expected);
}

// ---- Blocks
template <bool fault>
__global__ void blocks_add(float* out, const float* in) {
  if (threadIdx.x > 0) return;
  if (fault)
    out[0] += in[blockIdx.x];
  else
    atomicAdd(out, in[blockIdx.x]);
}
template <bool fault>
bool test_blocks_add() {
  const Device<float> d(count(8)), out(Floats{0.0f});
  ok(gpu_launch(blocks_add<fault>, 8, 64, 0, nullptr, out, d));
  return out.host()[0] == 36.0f;
}

template <bool fault>
__global__ void reads_the_block_before(float* out, const float* in) {
  const unsigned i = 64 * blockIdx.x + threadIdx.x;
  if (fault)
    out[i] = (blockIdx.x == 0 ? 0.0f : out[i - 64]) + in[i];
  else
    for (unsigned j = threadIdx.x; j <= i; j += 64) out[i] = (j < 64 ? 0.0f : out[i]) + in[j];
}
template <bool fault>
bool test_reads_the_block_before() {
  Floats expected;
  for (int i = 0; i < 256; ++i) {
    float sum = 0.0f;
    for (int j = i % 64; j <= i; j += 64) sum += static_cast<float>(j + 1);
    expected.push_back(sum);
  }
  return run(reads_the_block_before<fault>, count(256), expected, 4);
}

template <bool fault>
__global__ void last_block_adds(float* out, const float* in,
                                unsigned* done) {  // Programming Guide, "Memory Fence Functions"
  if (threadIdx.x > 0) return;
  out[blockIdx.x] = in[blockIdx.x];
  if (!fault) __threadfence();
  if (atomicAdd(done, 1u) < gridDim.x - 1) return;
  if (!fault) __threadfence();
  float sum = 0.0f;
  for (unsigned b = 0; b < gridDim.x; ++b) sum += out[b];
  out[gridDim.x] = sum;
}
template <bool fault>
bool test_last_block_adds() {
  const Device<float> d(count(8)), out(9);
  const Device<unsigned> done(std::vector<unsigned>{0});
  ok(gpu_launch(last_block_adds<fault>, 8, 64, 0, nullptr, out, d, done));
  return out.host()[8] == 36.0f;
}

// ---- Warps
template <bool fault>
__global__ void mask_without_caller(float* out, const float* in) {
  out[threadIdx.x] = __shfl_xor_sync(fault ? 0xffffu : all, in[threadIdx.x], 1);
}
template <bool fault>
bool test_mask_without_caller() {
  return run(mask_without_caller<fault>, count(64), swapped());
}

template <bool fault>
__global__ void shuffle_in_half_a_warp(float* out, const float* in) {
  const unsigned lane = threadIdx.x % 32;
  out[threadIdx.x] = in[threadIdx.x ^ 1];
  if (lane < 16) out[threadIdx.x] = __shfl_xor_sync(fault ? all : 0xffffu, in[threadIdx.x], 1);
  __syncthreads();
}
template <bool fault>
bool test_shuffle_in_half_a_warp() {
  return run(shuffle_in_half_a_warp<fault>, count(64), swapped());
}

template <bool fault>
__global__ void shuffle_from_absent_lane(float* out, const float* in) {
  const unsigned lane = threadIdx.x % 32;
  out[threadIdx.x] = in[threadIdx.x ^ 1];
  if (lane < 16) {
    const float x = __shfl_sync(0xffffu, in[threadIdx.x], fault ? 16 : 0);
    if (lane == 1) out[threadIdx.x] = x;
  }
}
template <bool fault>
bool test_shuffle_from_absent_lane() {
  return run(shuffle_from_absent_lane<fault>, count(64), swapped());
}

template <bool fault>
__global__ void mma_in_a_branch(float* out, const float* in) {
  float d[4] = {};
  const std::uint32_t a[4] = {}, b[2] = {};
  if (!fault || threadIdx.x % 32 < 30) mma_m16n8k16(d, a, b);
  out[threadIdx.x] = in[threadIdx.x] + d[0];
}
template <bool fault>
bool test_mma_in_a_branch() {
  return run(mma_in_a_branch<fault>, count(64), count(64));
}

template <bool fault>
__global__ void ldmatrix_misaligned(float* out, const float* in) {
  GPU_SHARED(std::uint16_t, s, 32 * 16);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int i = static_cast<int>(threadIdx.x); i < 32 * 16; i += 64) s[i] = 0;
  __syncthreads();
  std::uint32_t r[4];
  ldmatrix_x4(r, s + lane * (fault ? 12 : 16));  // rows of 24 bytes
  out[threadIdx.x] = in[threadIdx.x] + static_cast<float>(r[0]);
}
template <bool fault>
bool test_ldmatrix_misaligned() {
  return run(ldmatrix_misaligned<fault>, count(64), count(64));
}

// ---- Alignment
template <bool fault>
__global__ void load16_misaligned(float* out, const float* in) {
  const auto p = load16(in + 4 * threadIdx.x + (fault ? 1 : 0));
  out[threadIdx.x] = p[fault ? 0 : 1];
}
template <bool fault>
bool test_load16_misaligned() {
  Floats expected;
  for (int i = 0; i < 64; ++i) expected.push_back(static_cast<float>(4 * i + 2));
  return run(load16_misaligned<fault>, count(260), expected);
}

template <bool fault>
__global__ void float4_misaligned(float* out, const float* in) {
  const float4 p = *reinterpret_cast<const float4*>(in + 4 * threadIdx.x + (fault ? 1 : 0));
  out[threadIdx.x] = fault ? p.x : p.y;
}
template <bool fault>
bool test_float4_misaligned() {
  Floats expected;
  for (int i = 0; i < 64; ++i) expected.push_back(static_cast<float>(4 * i + 2));
  return run(float4_misaligned<fault>, count(260), expected);
}

// ---- Launches. Error codes count as caught, as gpu_launch may not be ignored.
__global__ void fill(float* out, int n) {
  if (blockIdx.y > 0) return;
  for (int i = static_cast<int>(threadIdx.x + threadIdx.y * blockDim.x); i < n;
       i += static_cast<int>(blockDim.x * blockDim.y))
    out[i] = 1.0f;
}
bool launched(dim3 grid, dim3 block, std::size_t smem) {
  const Device<float> out(8);
  ok(gpu_launch(fill, grid, block, smem, nullptr, out, 8));
  return out.host() == Floats(8, 1.0f);
}
template <bool fault>
bool test_block_too_large() {
  return launched(1, dim3(64, fault ? 17 : 16), 0);
}
template <bool fault>
bool test_grid_too_large() {
  return launched(dim3(1, fault ? 65536 : 3), 1, 0);
}
template <bool fault>
bool test_grid_empty() {
  return launched(fault ? 0 : 1, 1, 0);
}
template <bool fault>
bool test_smem_without_attribute() {
  return launched(1, 1, (fault ? 49 : 48) << 10);
}
template <bool fault>
bool test_smem_above_limit() {
  const int bytes = (fault ? 228 : 227) << 10;
  ok(cudaFuncSetAttribute(reinterpret_cast<const void*>(fill), cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  return launched(1, 1, static_cast<std::size_t>(bytes));
}

template <bool fault>
bool test_host_pointer() {
  const Device<float> d(count(64)), out(64);
  const Floats host = count(64);
  ok(gpu_launch(no_syncwarp<false>, 1, 64, 0, nullptr, out, fault ? host.data() : static_cast<const float*>(d)));
  return out.host() == swapped();
}

struct View {
  const float* data;
  int rows, columns;
};
__global__ void copy_view(float* out, View v) { out[threadIdx.x] = v.data[threadIdx.x]; }
template <bool fault>
bool test_host_pointer_in_struct() {
  const Device<float> d(count(64)), out(64);
  const Floats host = count(64);
  ok(gpu_launch(copy_view, 1, 64, 0, nullptr, out,
                View{fault ? host.data() : static_cast<const float*>(d), 50257, 32000}));
  return out.host() == count(64);
}

template <bool fault>
bool test_use_after_free() {
  const Device<float> out(64);
  float* d = nullptr;
  ok(cudaMalloc(&d, 64 * sizeof(float)));
  ok(cudaMemcpy(d, count(64).data(), 64 * sizeof(float), cudaMemcpyHostToDevice));
  if (fault) ok(cudaFree(d));
  ok(gpu_launch(copy_view, 1, 64, 0, nullptr, out, View{d, 64, 1}));
  const Floats x = out.host();
  if (!fault) ok(cudaFree(d));
  return x == count(64);
}

template <bool fault>
bool test_free_twice() {
  float* d = nullptr;
  ok(cudaMalloc(&d, 4));
  ok(cudaFree(d));
  if (fault) ok(cudaFree(d));
  return true;
}

template <bool fault>
bool test_leak() {
  float* d = nullptr;
  ok(cudaMalloc(&d, 4));
  if (!fault) ok(cudaFree(d));
  return true;
}

template <bool fault>
bool test_stream_leak() {
  cudaStream_t s = nullptr;
  ok(cudaStreamCreate(&s));
  if (!fault) ok(cudaStreamDestroy(s));
  return true;
}

// ---- Streams
__global__ void add_one(float* out, const float* in) { out[threadIdx.x] = in[threadIdx.x] + 1.0f; }

enum class Order { right, no_wait, recorded_before };
template <Order fault>
bool test_two_streams() {
  const Device<float> x(Floats(64, 1.0f)), y(64), z(64);
  cudaStream_t a = nullptr, b = nullptr;
  cudaEvent_t e = nullptr;
  ok(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking));
  ok(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking));
  ok(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
  if (fault == Order::recorded_before) ok(cudaEventRecord(e, a));
  ok(gpu_launch(add_one, 1, 64, 0, a, y, x));
  if (fault != Order::recorded_before) ok(cudaEventRecord(e, a));
  if (fault != Order::no_wait) ok(cudaStreamWaitEvent(b, e, 0));
  ok(gpu_launch(add_one, 1, 64, 0, b, z, y));
  ok(cudaStreamSynchronize(b));
  const bool right = z.host() == Floats(64, 3.0f);
  ok(cudaStreamDestroy(a));
  ok(cudaStreamDestroy(b));
  ok(cudaEventDestroy(e));
  return right;
}

template <bool fault>
bool test_memset_on_other_stream() {
  const Device<float> x(count(64)), y(64);
  cudaStream_t s = nullptr;
  ok(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  ok(cudaMemsetAsync(y, 0, 256, fault ? nullptr : s));
  ok(gpu_launch(accumulate<false>, 1, 64, 0, s, y, x));
  ok(cudaStreamSynchronize(s));
  const bool right = y.host() == count(64);
  ok(cudaStreamDestroy(s));
  return right;
}

template <bool fault>
bool test_read_before_copy_is_done() {
  const Device<float> x(count(64));
  cudaStream_t s = nullptr;
  float* pinned = nullptr;
  ok(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  ok(cudaMallocHost(&pinned, 256));
  ok(cudaMemcpyAsync(pinned, x, 256, cudaMemcpyDeviceToHost, s));
  if (!fault) ok(cudaStreamSynchronize(s));
  const bool right = pinned[63] == 64.0f;
  ok(cudaStreamDestroy(s));
  ok(cudaFreeHost(pinned));
  return right;
}

template <bool fault>
bool test_write_before_copy_is_done() {
  const Device<float> x(1);
  cudaStream_t s = nullptr;
  float* pinned = nullptr;
  ok(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  ok(cudaMallocHost(&pinned, 4));
  pinned[0] = 1.0f;
  ok(cudaMemcpyAsync(x, pinned, 4, cudaMemcpyHostToDevice, s));
  if (!fault) ok(cudaStreamSynchronize(s));
  pinned[0] = 2.0f;
  ok(cudaStreamSynchronize(s));
  const bool right = x.host()[0] == 1.0f;
  ok(cudaStreamDestroy(s));
  ok(cudaFreeHost(pinned));
  return right;
}

// ---- Equivalent: nothing to catch.
template <bool fault>
__global__ void barrier_too_many(float* out, const float* in) {
  GPU_SHARED(float, s, 64);
  s[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  if (fault) __syncthreads();
  out[threadIdx.x] = s[63 - threadIdx.x];
}
template <bool fault>
bool test_barrier_too_many() {
  return run(barrier_too_many<fault>, count(64), reversed(64));
}

#define FAULT(name, by) \
  { #name, test_##name < false>, test_##name < true>, by }
const Fault faults[] = {
    FAULT(no_barrier, "plain tsan"),
    FAULT(no_barrier_before_reuse, "plain tsan"),
    FAULT(no_barrier_between_reductions, "plain tsan"),
    FAULT(no_syncwarp, "plain tsan"),
    FAULT(shuffle_as_barrier, "tsan"),
    FAULT(warp_barrier_for_block, "plain tsan"),
    FAULT(divergent_barrier, "plain asan tsan"),
    FAULT(barrier_in_uneven_loop, "plain asan tsan"),
    FAULT(two_writers, "plain tsan"),
    FAULT(count_without_atomic, "tsan"),
    FAULT(shared_write_past_end, "plain asan"),
    FAULT(shared_read_past_end, "plain asan"),
    FAULT(dynamic_past_end, "plain asan"),
    FAULT(no_tail_check, "plain asan tsan"),
    FAULT(tail_left_out, "plain asan tsan"),
    FAULT(write_before_start, "plain asan tsan"),
    FAULT(global_read_past_end, "plain asan tsan"),
    FAULT(unused_read_past_end, "asan"),
    FAULT(index_of_32_bits, "plain asan tsan"),
    FAULT(copy_past_end, "plain asan tsan"),
    FAULT(shared_sum_not_zeroed, "plain asan tsan"),
    FAULT(device_sum_not_zeroed, "plain asan tsan"),
    FAULT(maximum_of_unwritten, "plain"),
    FAULT(minimum_of_unwritten, "plain"),
    {"no_wait_for_copies", test_pipeline<Async::right>, test_pipeline<Async::no_wait>, "plain"},
    {"wait_leaves_one_group", test_pipeline<Async::right>, test_pipeline<Async::wait_leaves_one>, "plain"},
    {"copies_not_committed", test_pipeline<Async::right>, test_pipeline<Async::no_commit>, "plain"},
    {"no_barrier_after_copies", test_pipeline<Async::right>, test_pipeline<Async::no_barrier>, "plain tsan"},
    FAULT(misaligned_copy, "plain asan tsan"),
    FAULT(blocks_add, "tsan"),
    FAULT(reads_the_block_before, "plain tsan"),
    FAULT(last_block_adds, "tsan"),
    FAULT(mask_without_caller, "plain asan tsan"),
    FAULT(shuffle_in_half_a_warp, "plain asan tsan"),
    FAULT(shuffle_from_absent_lane, "plain asan tsan"),
    FAULT(mma_in_a_branch, "plain asan tsan"),
    FAULT(ldmatrix_misaligned, "plain asan tsan"),
    FAULT(load16_misaligned, "plain asan tsan"),
    FAULT(float4_misaligned, "asan"),
    FAULT(block_too_large, "plain asan tsan"),
    FAULT(grid_too_large, "plain asan tsan"),
    FAULT(grid_empty, "plain asan tsan"),
    FAULT(smem_without_attribute, "plain asan tsan"),
    FAULT(smem_above_limit, "plain asan tsan"),
    FAULT(host_pointer, "plain asan tsan"),
    FAULT(host_pointer_in_struct, "plain asan"),
    FAULT(use_after_free, "plain asan tsan"),
    FAULT(free_twice, "plain asan tsan"),
    FAULT(leak, "plain asan tsan"),
    FAULT(stream_leak, "plain asan tsan"),
    {"no_wait_for_event", test_two_streams<Order::right>, test_two_streams<Order::no_wait>, "plain tsan"},
    {"event_recorded_before", test_two_streams<Order::right>, test_two_streams<Order::recorded_before>, "plain tsan"},
    FAULT(memset_on_other_stream, "plain tsan"),
    FAULT(read_before_copy_is_done, "plain tsan"),
    FAULT(write_before_copy_is_done, "plain tsan"),
    FAULT(barrier_too_many, ""),  // equivalent
};

// How it ended, in a process of its own: "" where all is right.
std::string outcome(bool (*body)(), const standin::Mode& mode) {
  std::fflush(nullptr);
  int ends[2];
  EXPECT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDERR_FILENO);
    close(ends[0]);
    close(ends[1]);
    standin::mode() = mode;
    int code = 0;
    try {
      code = body() ? 0 : 3;
    } catch (const std::exception&) {
      code = 4;
    }
    std::exit(code);  // leaks are reported there
  }
  close(ends[1]);
  std::string text;
  char part[4096];
  for (ssize_t n; (n = read(ends[0], part, sizeof part)) > 0;) text.append(part, static_cast<std::size_t>(n));
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  if (status == 0) return "";
  if (text.find("AddressSanitizer") != std::string::npos || text.find("use-after-free") != std::string::npos)
    return "address";
  if (text.find("data race") != std::string::npos) return "race";
  if (text.find("runtime error") != std::string::npos) return "undefined";
  if (text.find("[standin]") != std::string::npos) return "check";
  if (WIFEXITED(status) && WEXITSTATUS(status) == 3) return "value";
  if (WIFEXITED(status) && WEXITSTATUS(status) == 4) return "error code";
  return "signal";
}

// Each build with each mode that tells it something: sanitizers watch accesses, whatever the order.
std::vector<std::pair<std::string, standin::Mode>> modes_of_build() {
  auto modes = standin_test::modes();
  if (std::string(build) != "plain") modes = {modes[0], modes[1]};
  return modes;
}

// A death test, as it forks: googletest runs those first, before there is any context that a child could not follow.
TEST(MutationsDeathTest, EveryFaultIsCaught) {
  const auto modes = modes_of_build();
  std::printf("%-30s caught by the %s build in\n", "fault", build);
  int planted = 0;
  for (const Fault& fault : faults) {
    std::string caught;
    for (const auto& [name, mode] : modes) {
      EXPECT_EQ(outcome(fault.right, mode), "") << fault.name << " without the fault, " << name;
      const std::string how = outcome(fault.wrong, mode);
      const std::string entry = name + ": " + how;
      if (how.empty() || caught.find(entry) != std::string::npos) continue;
      caught += (caught.empty() ? "" : ", ") + entry;
    }
    std::printf("%-30s %s\n", fault.name, caught.empty() ? "-" : caught.c_str());
    const std::string expected = fault.caught_by;
    const bool equivalent = expected.empty();
    if (equivalent) {
      EXPECT_EQ(caught, "") << fault.name;
    } else if (expected.find(build) != std::string::npos) {
      EXPECT_NE(caught, "") << fault.name << " is not caught";
    }
    planted += equivalent ? 0 : 1;
  }
  EXPECT_GE(planted, 25);
}

}  // namespace
}  // namespace rownorm
