// What kernels see, against the CUDA C++ Programming Guide and the PTX ISA.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "cuda/gpu.cuh"
#include "cuda/kernel.cuh"
#include "support.h"

namespace rownorm {
namespace {

using namespace standin_test;

__global__ void indices_kernel(int* out) {
  const int thread = static_cast<int>(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z));
  const int block = static_cast<int>(blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z));
  const int threads = static_cast<int>(blockDim.x * blockDim.y * blockDim.z);
  out[block * threads + thread] = block * 1000 + thread;
}

TEST(Kernels, EveryThreadOfEveryBlockRunsOnce) {
  in_every_mode([] {
    Device<int> out(3 * 2 * 2 * 5 * 3 * 2);
    ok(gpu_launch(indices_kernel, dim3(3, 2, 2), dim3(5, 3, 2), 0, nullptr, out));
    const std::vector<int> host = out.host();
    for (int i = 0; i < static_cast<int>(host.size()); ++i)
      EXPECT_EQ(host[static_cast<std::size_t>(i)], i / 30 * 1000 + i % 30);
  });
}

TEST(Kernels, OnlyTheEndsOfAGridRunWhereSoAsked) {
  for (const auto order : {standin::Order::forward, standin::Order::reversed, standin::Order::random})
    for (const std::size_t ends : {std::size_t{0}, std::size_t{1}, std::size_t{2}, std::size_t{6}}) {
      Device<int> out(std::vector<int>(11, -1));
      standin::mode() = {.order = order, .ends = ends};
      ok(gpu_launch(indices_kernel, 11, 1, 0, nullptr, out));
      const std::vector<int> host = out.host();
      for (int i = 0; i < 11; ++i) {
        const bool runs = ends == 0 || i < static_cast<int>(ends) || i >= 11 - static_cast<int>(ends);
        EXPECT_EQ(host[static_cast<std::size_t>(i)], runs ? i * 1000 : -1) << "ends " << ends << ", block " << i;
      }
      standin::mode() = {};
    }
}

// Reverses tiles of 64, twice through shared memory, with threads that leave early in the last tile.
__global__ void reverse_kernel(float* x, int n, int rounds) {
  GPU_SHARED(float, tile, 64);
  const int i = static_cast<int>(blockIdx.x) * 64 + static_cast<int>(threadIdx.x),
            size = min(64, n - static_cast<int>(blockIdx.x) * 64);
  if (i >= n) return;
  for (int round = 0; round < rounds; ++round) {
    tile[threadIdx.x] = x[i];
    __syncthreads();
    x[i] = tile[size - 1 - static_cast<int>(threadIdx.x)] + 1.0f;
    __syncthreads();
  }
}

TEST(Kernels, BarriersAndThreadsThatHaveLeft) {
  in_every_mode([] {
    std::vector<float> x(150);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i);
    Device<float> d(x);
    ok(gpu_launch(reverse_kernel, 3, 64, 0, nullptr, d, 150, 3));
    const std::vector<float> y = d.host();
    for (std::size_t i = 0; i < x.size(); ++i) {
      const std::size_t tile = i / 64 * 64, size = std::min<std::size_t>(64, 150 - tile);
      EXPECT_EQ(y[i], x[tile + size - 1 - (i - tile)] + 3.0f);
    }
  });
}

// One synchronisation of a real kernel taken away, by its line: drops.py does it to all of them.
__global__ void neighbour_kernel(int* out) {
  GPU_SHARED(int, s, 64);
  s[threadIdx.x] = static_cast<int>(threadIdx.x);
  __syncthreads();
  out[threadIdx.x] = s[63 - threadIdx.x];
}
constexpr int barrier_line = __LINE__ - 3;

TEST(Kernels, ABarrierCanBeDropped) {
  for (const bool dropped : {false, true}) {
    if (dropped && thread_sanitizer) break;  // which would report the race
    if (dropped) standin::mode() = {.drop_file = "/test_kernels.cpp", .drop_line = barrier_line};
    Device<int> out(64);
    ok(gpu_launch(neighbour_kernel, 1, 64, 0, nullptr, out));
    EXPECT_EQ(out.host()[0], dropped ? -1 : 63);  // nobody has written it yet
  }
  standin::mode() = {};
}

// block_sum of cuda/kernel.cuh, twice in a row, as it promises: each thread's sums. No kernel calls it so yet, so that
// only this test needs its first barrier.
__global__ void block_sums_kernel(double* out, const double* x) {
  const double first = cuda::block_sum(x[threadIdx.x]);
  const double second = cuda::block_sum(2 * x[threadIdx.x]);
  out[threadIdx.x] = first;
  out[blockDim.x + threadIdx.x] = second;
}

// Whether all sums are right in every mode, without the synchronisation in `line` of kernel.cuh.
bool block_sums_are_right(int line) {
  const std::size_t threads = 128;
  std::vector<double> x(threads), expected(2 * threads, 128 * 127 / 2);
  for (std::size_t i = 0; i < threads; ++i) x[i] = static_cast<double>(i);
  std::fill(expected.begin() + threads, expected.end(), 2 * expected[0]);
  bool right = true;
  for (auto [name, mode] : modes()) {
    mode.drop_file = "/kernel.cuh";
    mode.drop_line = line;
    standin::mode() = mode;
    const Device<double> in(x), out(2 * threads);
    ok(gpu_launch(block_sums_kernel, 1, threads, 0, nullptr, out, in));
    right = out.host() == expected && right;
  }
  standin::mode() = {};
  return right;
}

TEST(Kernels, BlockSumsInARowNeedEachOfItsBarriers) {
  EXPECT_TRUE(block_sums_are_right(0));
  std::ifstream source(ROWNORM_SOURCE "/cuda/kernel.cuh");
  int barriers = 0, number = 0;
  for (std::string line; std::getline(source, line);) {
    ++number;
    if (line.find("__syncthreads()") == std::string::npos) continue;
    ++barriers;
    if (!thread_sanitizer) {  // which would report the race
      EXPECT_FALSE(block_sums_are_right(number)) << "kernel.cuh:" << number;
    }
  }
  EXPECT_EQ(barriers, 2) << "barriers of kernel.cuh, all of them in block_sum";
}

__global__ void votes_kernel(int* out) {
  const int t = static_cast<int>(threadIdx.x);
  out[t] = __syncthreads_count(t % 3 == 0);
  out[64 + t] = __syncthreads_and(t < 40) + 2 * __syncthreads_and(1);
  out[128 + t] = __syncthreads_or(t == 39) + 2 * __syncthreads_or(0);
}

TEST(Kernels, BarriersThatCount) {
  Device<int> out(192);
  ok(gpu_launch(votes_kernel, 1, 40, 0, nullptr, out));
  const std::vector<int> host = out.host();
  for (std::size_t t = 0; t < 40; ++t) {
    EXPECT_EQ(host[t], 14);
    EXPECT_EQ(host[64 + t], 3);
    EXPECT_EQ(host[128 + t], 1);
  }
}

__global__ void shuffles_kernel(int* out, int width) {
  const unsigned all = 0xffffffffu;
  const int lane = static_cast<int>(threadIdx.x), x = 100 + lane;
  out[lane] = __shfl_sync(all, x, 5, width);
  out[32 + lane] = __shfl_up_sync(all, x, 3, width);
  out[64 + lane] = __shfl_down_sync(all, x, 3, width);
  out[96 + lane] = __shfl_xor_sync(all, x, 5, width);
  out[128 + lane] = static_cast<int>(__shfl_xor_sync(all, 1e9 * x, 1, width) / 1e9);  // 8 bytes
  out[160 + lane] = __shfl_sync(all, x, lane + 1, width);
}

// PTX ISA, shfl: the source lane j by its clamp and segment mask, for each of the four modes.
TEST(Kernels, Shuffles) {
  in_every_mode([] {
    for (int width : {32, 16, 8, 4}) {
      Device<int> out(192);
      ok(gpu_launch(shuffles_kernel, 1, 32, 0, nullptr, out, width));
      const std::vector<int> host = out.host();
      const int segment_mask = 32 - width;
      for (int lane = 0; lane < 32; ++lane) {
        const int lowest = lane & segment_mask, highest = lowest | (31 & ~segment_mask);
        const auto at = [&](int row) { return host[static_cast<std::size_t>(32 * row + lane)] - 100; };
        EXPECT_EQ(at(0), lowest | (5 & ~segment_mask));
        EXPECT_EQ(at(1), lane - 3 >= lowest ? lane - 3 : lane);
        EXPECT_EQ(at(2), lane + 3 <= highest ? lane + 3 : lane);
        EXPECT_EQ(at(3), (lane ^ 5) <= highest ? lane ^ 5 : lane);
        EXPECT_EQ(at(4), lane ^ 1);
        EXPECT_EQ(at(5), lowest | ((lane + 1) & 31 & ~segment_mask));
      }
    }
  });
}

__global__ void warp_kernel(unsigned* out) {
  const unsigned lane = threadIdx.x, mask = lane % 2 == 0 ? 0x55555555u : 0xaaaaaaaau;
  out[lane] = __ballot_sync(mask, lane < 8);
  out[32 + lane] = static_cast<unsigned>(__any_sync(mask, lane == 3) + 2 * __all_sync(mask, lane < 31));
  out[64 + lane] = static_cast<unsigned>(__reduce_add_sync(mask, static_cast<int>(lane) - 16));
  out[96 + lane] = static_cast<unsigned>(__reduce_min_sync(mask, static_cast<int>(lane) - 16));
  out[128 + lane] = __reduce_max_sync(mask, lane);
  out[160 + lane] = static_cast<unsigned>(warp_sum(static_cast<float>(lane)) + warp_max(static_cast<float>(lane % 7)));
}

TEST(Kernels, VotesAndReductionsOfHalfWarps) {
  in_every_mode([] {
    Device<unsigned> out(192);
    ok(gpu_launch(warp_kernel, 1, 32, 0, nullptr, out));
    const std::vector<unsigned> host = out.host();
    for (std::size_t lane = 0; lane < 32; ++lane) {
      const bool odd = lane % 2 != 0;
      EXPECT_EQ(host[lane], odd ? 0xaau : 0x55u);
      EXPECT_EQ(host[32 + lane], odd ? 1u : 2u);
      EXPECT_EQ(static_cast<int>(host[64 + lane]), odd ? 0 : -16);  // sums of odd and of even lanes: 256, 240; less 256
      EXPECT_EQ(static_cast<int>(host[96 + lane]), odd ? -15 : -16);
      EXPECT_EQ(host[128 + lane], odd ? 31u : 30u);
      EXPECT_EQ(host[160 + lane], 496u + 6u);
    }
  });
}

__global__ void atomics_kernel(int* i, float* f, unsigned* u) {
  const int t = static_cast<int>(threadIdx.x);
  atomicAdd(i, t);
  atomicMax(i + 1, t * 7 % 64);
  atomicMin(i + 2, -(t * 7 % 64));
  atomicAdd(f, 0.5f);
  atomicOr(u, 1u << t % 32);
  for (unsigned old = 0, seen; (seen = atomicCAS(u + 1, old, old + 3)) != old; old = seen) continue;
}

TEST(Kernels, Atomics) {
  Device<int> i(std::vector<int>(3, 0));
  Device<float> f(std::vector<float>(1, 0.0f));
  Device<unsigned> u(std::vector<unsigned>(2, 0));
  ok(gpu_launch(atomics_kernel, 1, 64, 0, nullptr, i, f, u));
  EXPECT_EQ(i.host(), (std::vector<int>{2016, 63, -63}));
  EXPECT_EQ(f.host()[0], 32.0f);
  EXPECT_EQ(u.host(), (std::vector<unsigned>{0xffffffffu, 192}));
}

__global__ void fresh_memory_kernel(float* out, const float* never_written) {
  GPU_SHARED(float, a, 4);
  GPU_DYN_SMEM(__nv_bfloat16, b);
  if (std::isnan(a[3]) && std::isnan(__bfloat162float(b[7])) && std::isnan(never_written[1])) out[blockIdx.x] = 1.0f;
  a[3] = 0.0f;
  b[7] = a[3];
}

TEST(Kernels, MemoryBeginsAsNaNInEveryBlock) {
  Device<float> out(3), never(2);
  ok(gpu_launch(fresh_memory_kernel, 3, 1, 16, nullptr, out, never));
  EXPECT_EQ(out.host(), std::vector<float>(3, 1.0f));
}

// ---- PTX. Fragments as the PTX ISA draws them: groups of four lanes hold rows, pairs of columns (CUDA.md: formulas in
// another form than the stand-in's own).
std::uint32_t pair(float low, float high) {
  const __nv_bfloat162 both(__nv_bfloat16{low}, __nv_bfloat16{high});
  return reinterpret_cast<const std::uint32_t&>(both);
}

__global__ void mma_kernel(float* d, const float* A, const float* B, const float* C) {
  const int lane = static_cast<int>(threadIdx.x), g = lane / 4, t = lane % 4;
  std::uint32_t a[4], b[2];
  a[0] = pair(A[g * 16 + 2 * t], A[g * 16 + 2 * t + 1]);
  a[1] = pair(A[(g + 8) * 16 + 2 * t], A[(g + 8) * 16 + 2 * t + 1]);
  a[2] = pair(A[g * 16 + 2 * t + 8], A[g * 16 + 2 * t + 9]);
  a[3] = pair(A[(g + 8) * 16 + 2 * t + 8], A[(g + 8) * 16 + 2 * t + 9]);
  b[0] = pair(B[2 * t * 8 + g], B[(2 * t + 1) * 8 + g]);
  b[1] = pair(B[(2 * t + 8) * 8 + g], B[(2 * t + 9) * 8 + g]);
  float c[4] = {C[g * 8 + 2 * t], C[g * 8 + 2 * t + 1], C[(g + 8) * 8 + 2 * t], C[(g + 8) * 8 + 2 * t + 1]};
  mma_m16n8k16(c, a, b);
  d[g * 8 + 2 * t] = c[0];
  d[g * 8 + 2 * t + 1] = c[1];
  d[(g + 8) * 8 + 2 * t] = c[2];
  d[(g + 8) * 8 + 2 * t + 1] = c[3];
}

// The usual way to a product: A row-major by ldmatrix (lane: row lane % 16, columns from 8 (lane / 16)), B row-major by
// ldmatrix.trans (lane: row lane % 16, the two 8-column halves), which needs no formula of a fragment but that of d.
__global__ void ldmatrix_mma_kernel(float* d, const float* A, const float* B) {
  GPU_SHARED(__nv_bfloat16, as, 16 * 16);
  GPU_SHARED(__nv_bfloat16, bs, 16 * 16);
  const int lane = static_cast<int>(threadIdx.x), g = lane / 4, t = lane % 4;
  for (int i = lane; i < 256; i += 32) {
    as[i] = __float2bfloat16(A[i]);
    bs[i] = __float2bfloat16(B[i / 16 * 8 + i % 8]);  // the 8 columns twice
  }
  __syncwarp();
  std::uint32_t a[4], b4[4];
  ldmatrix_x4(a, as + lane % 16 * 16 + lane / 16 * 8);
  ldmatrix_x4_trans(b4, bs + lane % 16 * 16 + lane / 16 * 8);
  for (int half = 0; half < 2; ++half) {
    const std::uint32_t b[2] = {b4[2 * half], b4[2 * half + 1]};
    float c[4] = {};
    mma_m16n8k16(c, a, b);
    for (int i = 0; i < 4; ++i) d[half * 128 + (g + i / 2 * 8) * 8 + 2 * t + i % 2] = c[i];
  }
}

TEST(Ptx, MmaIsTheProduct) {
  in_every_mode([] {
    std::vector<float> A(256), B(128), C(128), expected(128), product(128);  // small integers: exact
    for (std::size_t i = 0; i < 256; ++i) A[i] = static_cast<float>(i * 37 % 101) - 50.0f;
    for (std::size_t i = 0; i < 128; ++i)
      B[i] = static_cast<float>(i * 53 % 97) - 48.0f, C[i] = static_cast<float>(i) * 1000.0f;
    for (std::size_t m = 0; m < 16; ++m)
      for (std::size_t n = 0; n < 8; ++n) {
        for (std::size_t k = 0; k < 16; ++k) product[m * 8 + n] += A[m * 16 + k] * B[k * 8 + n];
        expected[m * 8 + n] = product[m * 8 + n] + C[m * 8 + n];
      }
    const Device<float> a(A), b(B), c(C), d(128), twice(256);
    ok(gpu_launch(mma_kernel, 1, 32, 0, nullptr, d, a, b, c));
    EXPECT_EQ(d.host(), expected);
    ok(gpu_launch(ldmatrix_mma_kernel, 1, 32, 0, nullptr, twice, a, b));
    const std::vector<float> both = twice.host();
    EXPECT_EQ(std::vector<float>(both.begin(), both.begin() + 128), product);
    EXPECT_EQ(std::vector<float>(both.begin() + 128, both.end()), product);
  });
}

__global__ void ldmatrix_kernel(std::uint32_t* out, bool transposed) {
  GPU_SHARED(std::uint16_t, m, 4 * 64);
  for (int i = static_cast<int>(threadIdx.x); i < 256; i += 32) m[i] = static_cast<std::uint16_t>(i);
  __syncwarp();
  std::uint32_t r[4];
  if (transposed)
    ldmatrix_x4_trans(r, m + threadIdx.x * 8);
  else
    ldmatrix_x4(r, m + threadIdx.x * 8);
  for (unsigned j = 0; j < 4; ++j) out[threadIdx.x * 4 + j] = r[j];
}

TEST(Ptx, LdmatrixFragments) {
  in_every_mode([] {
    for (bool transposed : {false, true}) {
      Device<std::uint32_t> out(128);
      ok(gpu_launch(ldmatrix_kernel, 1, 32, 0, nullptr, out, transposed));
      const std::vector<std::uint32_t> host = out.host();
      // PTX ISA, ldmatrix, "fragment layout for one 8x8 Matrix": thread 0 holds row 0, elements 0 and 1; thread 1
      // elements 2 and 3; thread 4 begins row 1. Element e of row r of matrix j is 64 j + 8 r + e here.
      for (std::uint32_t i = 0; i < 128; ++i) {
        const std::uint32_t thread = i / 4, j = i % 4, r = thread >> 2, e = (thread & 3) << 1;
        const std::uint32_t low = transposed ? 64 * j + 8 * e + r : 64 * j + 8 * r + e;
        EXPECT_EQ(host[i], low | (low + (transposed ? 8 : 1)) << 16) << thread << " " << j;
      }
    }
  });
}

// Two stages of tiles in flight; rows beyond n are zeros.
__global__ void pipeline_kernel(float* out, const float* x, int tiles, int n) {
  GPU_SHARED(float, stage, 2 * 128);
  const int t = static_cast<int>(threadIdx.x);
  const auto issue = [&](int tile) {
    const int at = tile * 128 + 4 * t;
    cp_async_16(stage + tile % 2 * 128 + 4 * t, x + at, at < n);
    cp_async_commit();
  };
  issue(0);
  for (int tile = 0; tile < tiles; ++tile) {
    if (tile + 1 < tiles) {
      issue(tile + 1);
      cp_async_wait<1>();
    } else {
      cp_async_wait<0>();
    }
    __syncthreads();
    for (int i = t; i < 128; i += 32) out[tile * 128 + i] = stage[tile % 2 * 128 + 127 - i];
    __syncthreads();
  }
}

TEST(Ptx, AsynchronousCopies) {
  in_every_mode([] {
    std::vector<float> x(512);
    for (std::size_t i = 0; i < 512; ++i) x[i] = static_cast<float>(i + 1);
    x.resize(400);
    const Device<float> d(x), out(512);
    ok(gpu_launch(pipeline_kernel, 1, 32, 0, nullptr, out, d, 4, 400));
    const std::vector<float> y = out.host();
    for (std::size_t i = 0; i < 512; ++i) {
      const std::size_t from = i / 128 * 128 + 127 - i % 128;
      EXPECT_EQ(y[i], from < 400 ? x[from] : 0.0f);
    }
  });
}

__global__ void copies_of_one_thread_kernel(float* out, const float* x) {
  GPU_SHARED(float, s, 16);
  for (int i = 0; i < 16; ++i) s[i] = 0.0f;
  cp_async_16(s, x);
  cp_async_commit();
  cp_async_16(s + 4, x + 4);
  cp_async_commit();
  cp_async_16(s + 8, x + 8);  // in no group
  cp_async_wait<1>();
  for (int i = 0; i < 12; ++i) out[i] = s[i];
}

TEST(Ptx, AWaitIsForCommittedGroups) {
  const Device<float> x(std::vector<float>{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}), out(12);
  ok(gpu_launch(copies_of_one_thread_kernel, 1, 1, 0, nullptr, out, x));
  EXPECT_EQ(out.host(), (std::vector<float>{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}));
  standin::mode() = {.late_copies = true};
  ok(gpu_launch(copies_of_one_thread_kernel, 1, 1, 0, nullptr, out, x));
  standin::mode() = {};
  EXPECT_EQ(out.host(), (std::vector<float>{1, 2, 3, 4, 0, 0, 0, 0, 0, 0, 0, 0}));
}

__global__ void pack_kernel(__nv_bfloat16* out, const __nv_bfloat16* x) {
  auto p = load16(x + 8 * threadIdx.x);
  for (int i = 0; i < p.size; ++i) p[i] = __float2bfloat16(2.0f * __bfloat162float(p[i]));
  store16(out + 8 * threadIdx.x, p);
  store16_stream(out + 16 + 8 * threadIdx.x, load16_stream(x + 8 * threadIdx.x));
}

TEST(Kernels, SixteenBytesAtOnce) {
  std::vector<__nv_bfloat16> x;
  for (int i = 0; i < 16; ++i) x.emplace_back(static_cast<float>(i));
  const Device<__nv_bfloat16> in(x), out(32);
  ok(gpu_launch(pack_kernel, 1, 2, 0, nullptr, out, in));
  const std::vector<__nv_bfloat16> y = out.host();
  for (std::size_t i = 0; i < 16; ++i) {
    EXPECT_EQ(__bfloat162float(y[i]), static_cast<float>(2 * i));
    EXPECT_EQ(__bfloat162float(y[16 + i]), static_cast<float>(i));
  }
}

__global__ void arithmetic_kernel(float* out) {
  out[0] = rsqrtf(4.0f);
  out[1] = max(2.0f, NAN);  // NaN is dropped
  out[2] = __uint_as_float(0x3f800000u);
  out[3] = static_cast<float>(__popc(0xf0u) + __clz(1) + __ffs(8));
  out[4] = static_cast<float>(min(3, 2u));
  out[5] = __fmaf_rn(2.0f, 3.0f, 4.0f);
}

TEST(Kernels, Arithmetic) {
  const Device<float> out(6);
  ok(gpu_launch(arithmetic_kernel, 1, 1, 0, nullptr, out));
  EXPECT_EQ(out.host(), (std::vector<float>{0.5f, 2.0f, 1.0f, 4 + 31 + 4, 2.0f, 10.0f}));
}

}  // namespace
}  // namespace rownorm
