// Runtime calls and checks of the stand-in, against the CUDA Runtime API and the Programming Guide's tables.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <vector>

#include "cuda/gpu.cuh"
#include "support.h"

namespace rownorm {
namespace {

using namespace standin_test;
using standin::live;
using standin::mode;

__global__ void add_kernel(float* x, float a) { x[threadIdx.x] += a; }

TEST(Runtime, MemoryIsCountedAndLimited) {
  const std::size_t before = live().bytes;
  mode().memory = before + 1000;
  void *a = nullptr, *b = nullptr;
  EXPECT_EQ(cudaMalloc(&a, 600), cudaSuccess);
  std::size_t free = 0, total = 0;
  EXPECT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  EXPECT_EQ(free, 400u);
  EXPECT_EQ(cudaMalloc(&b, 401), cudaErrorMemoryAllocation);
  EXPECT_EQ(b, nullptr);
  EXPECT_EQ(cudaPeekAtLastError(), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_STREQ(cudaGetErrorString(cudaErrorMemoryAllocation), "out of memory");
  EXPECT_EQ(cudaFree(a), cudaSuccess);
  EXPECT_EQ(cudaFree(nullptr), cudaSuccess);
  EXPECT_EQ(live().bytes, before);
  mode() = {};
}

TEST(Runtime, MoreMemoryThanThereIsCanBeAddressed) {
  mode() = {.memory = std::size_t{1} << 40};
  constexpr std::size_t size = (std::size_t{1} << 38) + 5;  // as much as the thread sanitizer has addresses for
  char* p = nullptr;
  ok(cudaMalloc(&p, size));
  const auto at = [&](std::size_t i) {
    char value = -1;
    ok(cudaMemcpy(&value, p + i, 1, cudaMemcpyDeviceToHost));
    return value;
  };
  for (const std::size_t i : {std::size_t{0}, size / 2, size - 1}) {
    EXPECT_EQ(at(i), 0);
    ok(cudaMemset(p + i, 7, 1));
  }
  ok(cudaMemset(p + 1, 0, size - 2));
  EXPECT_EQ(at(0), 7);
  EXPECT_EQ(at(size / 2), 0);
  EXPECT_EQ(at(size - 1), 7);
  ok(cudaFree(p));
  mode() = {};
}

TEST(Runtime, CopiesAndFills) {
  const Device<float> a(std::vector<float>{1, 2, 3, 4}), b(4);
  ok(cudaMemset(b, 0, 16));
  ok(cudaMemcpy(b + 1, a, 8, cudaMemcpyDeviceToDevice));
  EXPECT_EQ(b.host(), (std::vector<float>{0, 1, 2, 0}));
  ok(cudaMemcpy(b, a + 2, 8, cudaMemcpyDefault));
  EXPECT_EQ(b.host(), (std::vector<float>{3, 4, 2, 0}));
}

TEST(Runtime, LazyStreamsWorkWhenTheHostWaits) {
  const Device<float> x(std::vector<float>(4, 0.0f));
  cudaStream_t s = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;
  float* pinned = nullptr;
  ok(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  ok(cudaEventCreate(&begin));
  ok(cudaEventCreate(&end));
  ok(cudaMallocHost(&pinned, 16));
  mode() = {.lazy = true};
  ok(cudaEventRecord(begin, s));
  ok(gpu_launch(add_kernel, 1, 4, 0, s, x, 2.0f));
  ok(cudaMemcpyAsync(pinned, x, 16, cudaMemcpyDeviceToHost, s));
  ok(cudaEventRecord(end, s));
  EXPECT_EQ(cudaEventQuery(end), cudaErrorNotReady);
  EXPECT_EQ(cudaStreamQuery(s), cudaErrorNotReady);
  float ms = -1.0f;
  EXPECT_EQ(cudaEventElapsedTime(&ms, begin, end), cudaErrorNotReady);
  ok(cudaEventSynchronize(end));
  EXPECT_EQ(pinned[0], 2.0f);
  EXPECT_EQ(cudaStreamQuery(s), cudaSuccess);
  ok(cudaEventElapsedTime(&ms, begin, end));
  EXPECT_GE(ms, 0.0f);
  mode() = {};
  ok(cudaStreamDestroy(s));
  ok(cudaEventDestroy(begin));
  ok(cudaEventDestroy(end));
  ok(cudaFreeHost(pinned));
}

TEST(Runtime, TheDefaultStreamWaitsForBlockingOnes) {
  for (const bool blocking : {true, false}) {
    const Device<float> x(std::vector<float>(1, 0.0f));
    cudaStream_t s = nullptr;
    ok(cudaStreamCreateWithFlags(&s, blocking ? cudaStreamDefault : cudaStreamNonBlocking));
    mode() = {.lazy = true};
    ok(gpu_launch(add_kernel, 1, 1, 0, s, x, 2.0f));
    ok(cudaMemcpy(x, x, 0, cudaMemcpyDeviceToDevice));  // nothing, and so no wait
    EXPECT_EQ(cudaStreamQuery(s), cudaErrorNotReady);
    const Device<float> y(1);
    ok(cudaMemset(y, 0, 4));  // in the default stream
    ok(cudaStreamSynchronize(nullptr));
    EXPECT_EQ(cudaStreamQuery(s), blocking ? cudaSuccess : cudaErrorNotReady);
    ok(cudaDeviceSynchronize());
    EXPECT_EQ(x.host()[0], 2.0f);
    mode() = {};
    ok(cudaStreamDestroy(s));
  }
}

TEST(Runtime, AWaitForAnEventThatWasNeverRecordedIsNothing) {
  cudaStream_t s = nullptr;
  cudaEvent_t e = nullptr;
  ok(cudaStreamCreate(&s));
  ok(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
  EXPECT_EQ(cudaStreamWaitEvent(s, e, 0), cudaSuccess);
  EXPECT_EQ(cudaEventSynchronize(e), cudaSuccess);
  float ms = 0.0f;
  EXPECT_EQ(cudaEventElapsedTime(&ms, e, e), cudaErrorInvalidResourceHandle);
  cudaGetLastError();
  ok(cudaStreamDestroy(s));
  ok(cudaEventDestroy(e));
}

__global__ void idle_kernel() {}

// Programming Guide, "Technical Specifications per Compute Capability".
TEST(Runtime, LimitsOfALaunch) {
  const auto launch = [&](dim3 grid, dim3 block, std::size_t smem) {
    const cudaError_t error = gpu_launch(idle_kernel, grid, block, smem, nullptr);
    EXPECT_EQ(cudaGetLastError(), error);
    return error;
  };
  EXPECT_EQ(launch(1, 1024, 0), cudaSuccess);
  EXPECT_EQ(launch(1, 1025, 0), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch(1, dim3(1, 1, 64), 0), cudaSuccess);
  EXPECT_EQ(launch(1, dim3(1, 1, 65), 0), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch(1, 0, 0), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch(0, 1, 0), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch(dim3(1, 65536), 1, 0), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch(dim3(1, 1, 65536), 1, 0), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch(0x80000000u, 1, 0), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch(1, 1, 48 << 10), cudaSuccess);
  EXPECT_EQ(launch(1, 1, (48 << 10) + 1), cudaErrorInvalidValue);
  const auto* kernel = reinterpret_cast<const void*>(idle_kernel);
  EXPECT_EQ(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (227 << 10) + 1),
            cudaErrorInvalidValue);
  cudaGetLastError();
  EXPECT_EQ(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 100 << 10), cudaSuccess);
  EXPECT_EQ(launch(1, 1, 100 << 10), cudaSuccess);
  EXPECT_EQ(launch(1, 1, (100 << 10) + 1), cudaErrorInvalidValue);
}

__global__ void hungry_kernel(float* x) {
  GPU_SHARED(float, fixed, 10 * 1024);
  GPU_DYN_SMEM(float, more);
  fixed[0] = more[0] = 1.0f;
  x[0] = fixed[0] + more[0];
}

// Checks end the process with a line that says what, where and in which kernel.
TEST(RuntimeDeathTest, ChecksSayWhatIsWrong) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a sanitizer's contexts do not survive a fork
  EXPECT_DEATH(
      {
        const Device<float> x(1);
        (void)gpu_launch(hungry_kernel, 1, 1, 9 << 10, nullptr, x);
      },
      "\\[standin\\] 9216 bytes of dynamic shared memory beside 40960 of arrays.*grid 1 x 1 x 1 of 1 x 1 x 1");
  EXPECT_DEATH(
      {
        float host = 0.0f;
        (void)gpu_launch(add_kernel, 1, 1, 0, nullptr, &host, 0.0f);
      },
      "\\[standin\\] a kernel is given .* as parameter 1: host memory");
  EXPECT_DEATH(
      {
        const Device<float> x(4);
        cudaMemcpy(x, x + 2, 12, cudaMemcpyDeviceToDevice);
      },
      "\\[standin\\] cudaMemcpy, source of 12 bytes at .*, where an allocation ends after 8");
  EXPECT_DEATH(
      {
        float a = 0.0f;
        float b = 0.0f;
        cudaMemcpy(&a, &b, 4, cudaMemcpyDeviceToHost);
      },
      "\\[standin\\] cudaMemcpy, source: .* is host memory, expected the other kind");
  EXPECT_DEATH(cudaStreamSynchronize(reinterpret_cast<cudaStream_t>(64)),
               "\\[standin\\] a stream that was never created");
  EXPECT_EXIT(
      {
        float* leaked = nullptr;
        ok(cudaMalloc(&leaked, 12));
        std::exit(0);
      },
      testing::ExitedWithCode(86), "\\[standin\\] leaked: 1 device allocations \\(12 bytes\\), 0 pinned");
}

TEST(Runtime, OneDevice) {
  int count = 0, device = -1, value = 0;
  EXPECT_EQ(cudaGetDeviceCount(&count), cudaSuccess);
  EXPECT_EQ(count, 1);
  EXPECT_EQ(cudaGetDevice(&device), cudaSuccess);
  EXPECT_EQ(device, 0);
  EXPECT_EQ(cudaSetDevice(1), cudaErrorInvalidDevice);
  cudaGetLastError();
  cudaDeviceProp p;
  EXPECT_EQ(cudaGetDeviceProperties(&p, 0), cudaSuccess);
  EXPECT_EQ(p.sharedMemPerBlockOptin, 227u << 10);
  EXPECT_EQ(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 0), cudaSuccess);
  EXPECT_EQ(value, p.multiProcessorCount);
}

}  // namespace
}  // namespace rownorm
