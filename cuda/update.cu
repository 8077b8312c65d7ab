// The update: norm and clip, momentum, AdamW, row normalisation and projection (PAPER 4). All are bound by memory.
#include <cmath>

#include "cuda/kernel.cuh"

namespace rownorm::cuda {

namespace {

constexpr int threads = 256, warps = threads / 32;

// ---- norm and clip ----

template <int W>
__global__ void square_parts_kernel(double* parts, const float* x, Index packs) {
  double sum = 0;
  GPU_LOOP(i, packs) {
    float v[W];
    load(v, x + i * W);
    for (int j = 0; j < W; ++j) sum += static_cast<double>(v[j]) * static_cast<double>(v[j]);
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

// One block: sum += the parts
__global__ void add_parts_kernel(double* sum, const double* parts, int count) {
  double own = 0;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += threads) own += parts[i];
  own = block_sum(own);
  if (threadIdx.x == 0) *sum += own;
}

__global__ void clip_kernel(double* norm, double* clip, std::int32_t* ok, const double* squares, const double* loss,
                            double max_norm) {
  const double found = sqrt(*squares);
  const bool go = *ok != 0 && std::isfinite(*loss) && std::isfinite(found);
  *norm = found;
  *clip = go ? fmin(1.0, max_norm / (found + 1e-6)) : 0;
  *ok = go ? 1 : 0;
}

// ---- increments ----

struct MomentumFactors {
  float decay, grad_in, buffer_out, grad_out;
};

template <int W>
__global__ void momentum_kernel(float* out, float* buffer, const float* grad, const std::int32_t* ok,
                                const double* clip, MomentumFactors m, Index packs) {
  const bool go = *ok != 0;
  const auto by = static_cast<float>(*clip);
  GPU_LOOP(i, packs) {
    float result[W] = {};
    if (go) {
      float g[W], b[W];
      load(g, grad + i * W);
      load(b, buffer + i * W);
      for (int j = 0; j < W; ++j) {
        g[j] *= by;
        b[j] = m.decay * b[j] + m.grad_in * g[j];
        result[j] = m.buffer_out * b[j] + m.grad_out * g[j];
      }
      store(buffer + i * W, b);
    }
    store(out + i * W, result);
  }
}

struct AdamWFactors {
  float beta1, in1, beta2, in2, to_vhat, eps;
  double correction1;
};

// m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2, mhat = m / (1 - b1^t), vhat = v / (1 - b2^t).
template <int W>
__global__ void adamw_kernel(float* step, float* exp_avg, float* exp_avg_sq, const float* grad, const double* lr,
                             const std::int32_t* ok, const double* clip, AdamWFactors f, Index packs) {
  const bool go = *ok != 0;
  const auto by = static_cast<float>(*clip), rate = static_cast<float>(-*lr / f.correction1);
  GPU_LOOP(i, packs) {
    float increment[W] = {};
    if (go) {
      float g[W], m[W], v[W];
      load(g, grad + i * W);
      load(m, exp_avg + i * W);
      load(v, exp_avg_sq + i * W);
      for (int j = 0; j < W; ++j) {
        g[j] *= by;
        m[j] = f.beta1 * m[j] + f.in1 * g[j];
        v[j] = f.beta2 * v[j] + f.in2 * (g[j] * g[j]);
        increment[j] = rate * m[j] / (sqrtf(v[j] * f.to_vhat) + f.eps);
      }
      store(exp_avg + i * W, m);
      store(exp_avg_sq + i * W, v);
    }
    store(step + i * W, increment);
  }
}

template <int W>
__global__ void apply_step_kernel(float* w, const float* step, const double* lr, double weight_decay,
                                  const std::int32_t* ok, Index packs) {
  if (*ok == 0) return;
  const double keep = 1 - *lr * weight_decay;
  GPU_LOOP(i, packs) {
    float x[W], s[W];
    load(x, w + i * W);
    load(s, step + i * W);
    for (int j = 0; j < W; ++j) x[j] = static_cast<float>(keep * static_cast<double>(x[j]) + static_cast<double>(s[j]));
    store(w + i * W, x);
  }
}

template <int W>
__global__ void scale_kernel(float* x, const double* factor, double c, Index packs) {
  const double by = *factor * c;
  GPU_LOOP(i, packs) {
    float v[W];
    load(v, x + i * W);
    for (int j = 0; j < W; ++j) v[j] = static_cast<float>(static_cast<double>(v[j]) * by);
    store(x + i * W, v);
  }
}

// ---- rows of the head: a warp a row ----

template <int W>
__device__ double row_square(const float* row, Index d) {
  double sum = 0;
  for (Index i = threadIdx.x % 32 * W; i < d; i += 32 * W) {
    float v[W];
    load(v, row + i);
    for (int j = 0; j < W; ++j) sum += static_cast<double>(v[j]) * static_cast<double>(v[j]);
  }
  return warp_sum(sum);
}

template <int W>
__global__ void row_normalize_kernel(float* x, Index rows, Index d, double eps) {
  const Index row = static_cast<Index>(blockIdx.x) * warps + threadIdx.x / 32;
  if (row >= rows) return;
  float* own = x + row * d;
  const double norm = sqrt(row_square<W>(own, d));
  if (norm == 0) return;
  const double normalizer = 1 / (norm + eps);
  for (Index i = threadIdx.x % 32 * W; i < d; i += 32 * W) {
    float v[W];
    load(v, own + i);
    for (int j = 0; j < W; ++j) v[j] = static_cast<float>(static_cast<double>(v[j]) * normalizer);
    store(own + i, v);
  }
}

template <int W>
__global__ void row_norms_kernel(double* norms, const float* x, Index rows, Index d) {
  const Index row = static_cast<Index>(blockIdx.x) * warps + threadIdx.x / 32;
  if (row >= rows) return;
  const double square = row_square<W>(x + row * d, d);
  if (threadIdx.x % 32 == 0) norms[row] = sqrt(square);
}

// A block has 32 columns. Thread (column, part) sums the rows i with i % parts == part, in order; then the parts, in
// order.
constexpr int columns = 32, parts = 32;

__global__ void __launch_bounds__(columns* parts) column_sum_kernel(double* sum, const float* x, Index rows, Index d) {
  GPU_SHARED(double, sums, columns* parts);
  const unsigned column = threadIdx.x % columns, part = threadIdx.x / columns;
  const Index j = static_cast<Index>(blockIdx.x) * columns + column;
  double own = 0;
  if (j < d)
    for (Index i = part; i < rows; i += parts) own += static_cast<double>(x[i * d + j]);
  sums[threadIdx.x] = own;
  __syncthreads();
  if (part != 0 || j >= d) return;
  double all = 0;
  for (unsigned i = 0; i < parts; ++i) all += sums[i * columns + column];
  sum[j] = all;
}

// A block a row
__global__ void subtract_row_kernel(float* x, const double* row, double c, Index d) {
  float* own = x + static_cast<Index>(blockIdx.x) * d;
  for (Index j = threadIdx.x; j < d; j += threads)
    own[j] = static_cast<float>(static_cast<double>(own[j]) - c * row[j]);
}

// Calls launch<W>() with W = 4 where `size` elements from each of the pointers on can be read 16 bytes at a time,
// else 1.
template <class Launch>
void for_floats(Index size, std::initializer_list<const void*> pointers, Launch launch) {
  fits16(size, DType::f32, pointers) ? launch.template operator()<4>() : launch.template operator()<1>();
}

}  // namespace

void CudaBackend::do_squared_norm(Tensor sum, Tensor x) {
  Arena arena = scratch();
  add_squares(sum, x, PartialSums(arena));
}

void CudaBackend::add_squares(Tensor sum, Tensor x, const PartialSums& memory) {
  const Index size = x.size();
  if (size == 0) return;
  for_floats(size, {x.data}, [&]<int W>() {
    const auto blocks =
        static_cast<unsigned>(std::min<Index>((size / W + 4 * threads - 1) / (4 * threads), PartialSums::parts));
    check(gpu_launch(square_parts_kernel<W>, blocks, threads, 0, stream_, pointer<double>(memory.sums),
                     pointer<float>(x), size / W),
          "squared_norm");
    check(gpu_launch(add_parts_kernel, 1, threads, 0, stream_, pointer<double>(sum), pointer<double>(memory.sums),
                     static_cast<int>(blocks)),
          "squared_norm");
  });
}

void CudaBackend::do_clip(const UpdateControl& control, Tensor squares, Tensor loss, double max_norm) {
  check(gpu_launch(clip_kernel, 1, 1, 0, stream_, pointer<double>(control.norm), pointer<double>(control.clip),
                   pointer<std::int32_t>(control.ok), pointer<double>(squares), pointer<double>(loss), max_norm),
        "clip");
}

void CudaBackend::do_momentum(Tensor out, Tensor buffer, Tensor grad, const UpdateControl& control, const Momentum& m) {
  const Index size = grad.size();
  if (size == 0) return;
  const MomentumFactors factors{static_cast<float>(m.decay), static_cast<float>(m.grad_in),
                                static_cast<float>(m.buffer_out), static_cast<float>(m.grad_out)};
  for_floats(size, {out.data, buffer.data, grad.data}, [&]<int W>() {
    check(gpu_launch(momentum_kernel<W>, loop_blocks(size / W, threads), threads, 0, stream_, pointer<float>(out),
                     pointer<float>(buffer), pointer<float>(grad), pointer<std::int32_t>(control.ok),
                     pointer<double>(control.clip), factors, size / W),
          "momentum");
  });
}

void CudaBackend::do_adamw(Tensor step, Tensor exp_avg, Tensor exp_avg_sq, Tensor grad, Tensor lr,
                           const UpdateControl& control, const AdamWHyper& hyper, Index t) {
  const Index size = grad.size();
  if (size == 0) return;
  const auto count = static_cast<double>(t);
  const AdamWFactors factors{.beta1 = static_cast<float>(hyper.beta1),
                             .in1 = static_cast<float>(1 - hyper.beta1),
                             .beta2 = static_cast<float>(hyper.beta2),
                             .in2 = static_cast<float>(1 - hyper.beta2),
                             .to_vhat = static_cast<float>(1 / (1 - std::pow(hyper.beta2, count))),
                             .eps = static_cast<float>(hyper.eps),
                             .correction1 = 1 - std::pow(hyper.beta1, count)};
  for_floats(size, {step.data, exp_avg.data, exp_avg_sq.data, grad.data}, [&]<int W>() {
    check(gpu_launch(adamw_kernel<W>, loop_blocks(size / W, threads), threads, 0, stream_, pointer<float>(step),
                     pointer<float>(exp_avg), pointer<float>(exp_avg_sq), pointer<float>(grad), pointer<double>(lr),
                     pointer<std::int32_t>(control.ok), pointer<double>(control.clip), factors, size / W),
          "adamw");
  });
}

void CudaBackend::do_apply_step(Tensor w, Tensor step, Tensor lr, double weight_decay, const UpdateControl& control) {
  const Index size = w.size();
  if (size == 0) return;
  for_floats(size, {w.data, step.data}, [&]<int W>() {
    check(gpu_launch(apply_step_kernel<W>, loop_blocks(size / W, threads), threads, 0, stream_, pointer<float>(w),
                     pointer<float>(step), pointer<double>(lr), weight_decay, pointer<std::int32_t>(control.ok),
                     size / W),
          "apply_step");
  });
}

void CudaBackend::do_scale(Tensor x, Tensor factor, double c) {
  const Index size = x.size();
  if (size == 0) return;
  for_floats(size, {x.data}, [&]<int W>() {
    check(gpu_launch(scale_kernel<W>, loop_blocks(size / W, threads), threads, 0, stream_, pointer<float>(x),
                     pointer<double>(factor), c, size / W),
          "scale");
  });
}

void CudaBackend::do_row_normalize(Tensor x, double eps) {
  const Index V = x.dim(0), d = x.dim(1);
  if (V == 0) return;
  for_floats(d, {x.data}, [&]<int W>() {
    check(gpu_launch(row_normalize_kernel<W>, ceil_div(V, warps), threads, 0, stream_, pointer<float>(x), V, d, eps),
          "row_normalize");
  });
}

void CudaBackend::do_row_norms(Tensor norms, Tensor s) {
  const Index V = s.dim(0), d = s.dim(1);
  if (V == 0) return;
  for_floats(d, {s.data}, [&]<int W>() {
    check(gpu_launch(row_norms_kernel<W>, ceil_div(V, warps), threads, 0, stream_, pointer<double>(norms),
                     pointer<float>(s), V, d),
          "row_norms");
  });
}

void CudaBackend::do_column_sum(Tensor sum, Tensor x) {
  const Index V = x.dim(0), d = x.dim(1);
  check(gpu_launch(column_sum_kernel, ceil_div(d, columns), columns * parts, 0, stream_, pointer<double>(sum),
                   pointer<float>(x), V, d),
        "column_sum");
}

void CudaBackend::do_subtract_row(Tensor x, Tensor row, double c) {
  const Index V = x.dim(0), d = x.dim(1);
  if (V == 0) return;
  check(gpu_launch(subtract_row_kernel, ceil_div(V, 1), threads, 0, stream_, pointer<float>(x), pointer<double>(row), c,
                   d),
        "subtract_row");
}

}  // namespace rownorm::cuda
