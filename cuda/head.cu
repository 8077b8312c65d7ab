// Products with the head's matrix, a chunk of tokens at a time: the loss with its gradients, and the range of S h.
#include <cfloat>
#include <cmath>

#include "cuda/kernel.cuh"

namespace rownorm::cuda {

namespace {

constexpr int threads = 512;

// The largest of some logits, at least -FLT_MAX, and the sum of exp(z - highest). A NaN, or an infinity, makes the sum
// one.
struct LogSum {
  float highest = -FLT_MAX;
  double sum = 0;

  __device__ void add(const LogSum& other) {
    const float both = fmaxf(highest, other.highest);
    sum = sum * exp(static_cast<double>(highest - both)) + other.sum * exp(static_cast<double>(other.highest - both));
    highest = both;
  }
};

__device__ inline LogSum block_log_sum(float highest, float sum) {
  GPU_SHARED(LogSum, parts, threads / 32);
  LogSum own{highest, sum};
  for (int step = 16; step > 0; step /= 2)
    own.add({__shfl_xor_sync(0xffffffffu, own.highest, step), __shfl_xor_sync(0xffffffffu, own.sum, step)});
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = own;
  __syncthreads();
  LogSum all;
  for (int warp = 0; warp < threads / 32; ++warp) all.add(parts[warp]);
  return all;
}

// A block a row of z(rows, stride): losses = log sum_i exp(z_i) - z_target, and, where r is not null,
// r = scale (softmax(z) - onehot(target)), which may lie over z. Columns from V on have no part in either: 0 in r.
template <class T>
__global__ void cross_entropy_kernel(T* r, double* losses, const float* z, const std::int32_t* targets, Index V,
                                     Index stride, double scale) {
  const Index n = blockIdx.x, target = targets[n];
  const float* row = z + n * stride;
  const float of_target = row[target];
  float highest = -FLT_MAX, sum = 0;
  const auto add = [&](float value) {
    if (value > highest) {
      sum *= expf(highest - value);
      highest = value;
    }
    sum += expf(value - highest);
  };
  constexpr int W = Pack16<T>::size;
  const Index whole = V / W * W;
  for (Index i = static_cast<Index>(threadIdx.x) * W; i < whole; i += threads * W) {
    float v[W];
    load(v, row + i);
    for (int j = 0; j < W; ++j) add(v[j]);
  }
  if (whole + threadIdx.x < V) add(row[whole + threadIdx.x]);

  const LogSum all = block_log_sum(highest, sum);  // every thread has read of_target by the barrier in it
  if (threadIdx.x == 0) losses[n] = static_cast<double>(all.highest) + log(all.sum) - static_cast<double>(of_target);
  if (!r) return;
  const auto factor = static_cast<float>(scale / all.sum), one = static_cast<float>(scale);
  const auto gradient = [&](float value, Index i) {
    return expf(value - all.highest) * factor - (i == target ? one : 0.0f);
  };
  for (Index i = static_cast<Index>(threadIdx.x) * W; i < stride; i += threads * W) {
    float v[W];
    load(v, row + i);
    for (int j = 0; j < W; ++j) v[j] = i + j < V ? gradient(v[j], i + j) : 0.0f;
    store(r + n * stride + i, v);
  }
}

// One block: loss += scale * the sum of the losses
__global__ void add_losses_kernel(double* loss, const double* losses, int rows, double scale) {
  double sum = 0;
  for (int n = static_cast<int>(threadIdx.x); n < rows; n += threads) sum += losses[n];
  sum = block_sum(sum);
  if (threadIdx.x == 0) *loss += scale * sum;
}

// A block a row: its lowest and highest value, both NaN if one is
__global__ void range_kernel(float* lowest, float* highest, const float* z, Index V, Index stride) {
  GPU_SHARED(float, lows, threads / 32);
  GPU_SHARED(float, highs, threads / 32);
  const float* row = z + static_cast<Index>(blockIdx.x) * stride;
  float low = INFINITY, high = -INFINITY;
  bool nan = false;
  for (Index i = threadIdx.x; i < V; i += threads) {
    nan = nan || std::isnan(row[i]);
    low = fminf(low, row[i]);
    high = fmaxf(high, row[i]);
  }
  for (int step = 16; step > 0; step /= 2) {
    low = fminf(low, __shfl_xor_sync(0xffffffffu, low, step));
    high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, step));
  }
  if (threadIdx.x % 32 == 0) {
    lows[threadIdx.x / 32] = low;
    highs[threadIdx.x / 32] = high;
  }
  nan = __syncthreads_or(nan) != 0;
  if (threadIdx.x != 0) return;
  for (int warp = 0; warp < threads / 32; ++warp) {
    low = fminf(low, lows[warp]);
    high = fmaxf(high, highs[warp]);
  }
  lowest[blockIdx.x] = nan ? NAN : low;
  highest[blockIdx.x] = nan ? NAN : high;
}

}  // namespace

// z = h w^T; ce_n = log sum_i exp(z_ni) - z_n,target; r = scale (softmax(z_n) - onehot(target)); dh = r w, dw += r^T h.
// A V of any size would leave products of r, whose rows are V long, with 2-byte accesses: they, and w, are padded with
// zeros. dw is not: its last rows are products of their own.
void CudaBackend::do_head_loss(Tensor loss, Tensor dh, Tensor dw, Tensor h, Tensor w, Tensor targets, double scale) {
  const Index N = h.dim(0), V = w.dim(0), d = w.dim(1);
  const bool backward = dh.data != nullptr;
  Arena arena = scratch();
  const LogitsScratch memory(arena, compute_, N, V, d);
  const Index stride = memory.logits.dim(1);
  if (stride != V) {
    do_copy(memory.weights.rows(0, V), w);
    do_fill(memory.weights.rows(V, stride), 0);
    w = memory.weights;
  }

  for (Index begin = 0; begin < N; begin += LogitsScratch::rows) {
    const Index end = std::min(begin + LogitsScratch::rows, N), rows = end - begin;
    const Operand hidden{h.rows(begin, end).data, compute_, d};
    products_->multiply(rows, stride, d, 1, hidden, {w.data, compute_, d, true}, 0,
                        {memory.logits.data, DType::f32, stride}, multiply_);
    const auto softmax = [&]<class T>(T*) {
      check(gpu_launch(cross_entropy_kernel<T>, ceil_div(rows, 1), threads, 0, stream_,
                       backward ? pointer<T>(memory.gradients) : nullptr, pointer<double>(memory.losses),
                       pointer<float>(memory.logits), pointer<std::int32_t>(targets) + begin, V, stride, scale),
            "head_loss");
    };
    compute_ == DType::bf16 ? softmax(static_cast<bf16*>(nullptr)) : softmax(static_cast<float*>(nullptr));
    check(gpu_launch(add_losses_kernel, 1, threads, 0, stream_, pointer<double>(loss), pointer<double>(memory.losses),
                     static_cast<int>(rows), scale),
          "head_loss");

    if (!backward) continue;
    products_->multiply(rows, d, stride, 1, {memory.gradients.data, compute_, stride}, {w.data, compute_, d}, 0,
                        {dh.rows(begin, end).data, compute_, d}, multiply_);
    const auto weight_gradient = [&](Index first, Index last) {
      void* columns = static_cast<char*>(memory.gradients.data) + first * size_of(compute_);
      products_->multiply(last - first, d, rows, 1, {columns, compute_, stride, true}, hidden, 1,
                          {dw.rows(first, last).data, DType::f32, d}, multiply_);
    };
    weight_gradient(0, V / 8 * 8);
    weight_gradient(V / 8 * 8, V);
  }
}

// In f32 whatever the precision of the products: it is a measurement.
void CudaBackend::do_row_range(Tensor lowest, Tensor highest, Tensor h, Tensor s) {
  const Index P = h.dim(0), V = s.dim(0), d = s.dim(1);
  Arena arena = scratch();
  const LogitsScratch memory(arena, compute_, P, V, d);
  const Index stride = memory.logits.dim(1);
  for (Index begin = 0; begin < P; begin += LogitsScratch::rows) {
    const Index end = std::min(begin + LogitsScratch::rows, P), rows = end - begin;
    Tensor hidden = h.rows(begin, end);
    if (compute_ != DType::f32) {
      do_copy(memory.hidden.rows(0, rows), hidden);
      hidden = memory.hidden;
    }
    products_->multiply(rows, V, d, 1, {hidden.data, DType::f32, d}, {s.data, DType::f32, d, true}, 0,
                        {memory.logits.data, DType::f32, stride}, Multiply::f32);
    check(gpu_launch(range_kernel, ceil_div(rows, 1), threads, 0, stream_, pointer<float>(lowest) + begin,
                     pointer<float>(highest) + begin, pointer<float>(memory.logits), V, stride),
          "row_range");
  }
}

}  // namespace rownorm::cuda
