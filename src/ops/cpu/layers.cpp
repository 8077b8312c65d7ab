// Embedding, linear maps, RMSNorm, rotary positions and SwiGLU, each with its backward (PAPER 2).
#include <algorithm>
#include <cmath>
#include <cstring>

#include "ops/cpu/cpu_backend.h"

namespace rownorm::cpu {

// ---- embedding ----

void CpuBackend::do_embedding(Tensor y, Tensor tokens, Tensor w) {
  const Index N = y.dim(0), d = y.dim(1);
  const std::int32_t* token = tokens.as<std::int32_t>();
  const float* rows = w.as<float>();
  float* out = y.as<float>();
#pragma omp parallel for schedule(static) num_threads(threads_) if (N > 1)
  for (Index n = 0; n < N; ++n)
    std::memcpy(out + n * d, rows + token[n] * d, static_cast<std::size_t>(d) * sizeof(float));
}

// Worker k adds to the rows i with i % workers == k, so each row is summed by one thread, in order of n.
void CpuBackend::do_embedding_backward(Tensor dw, Tensor tokens, Tensor dy) {
  const Index N = dy.dim(0), d = dy.dim(1), workers = threads_;
  const std::int32_t* token = tokens.as<std::int32_t>();
  const float* gradient = dy.as<float>();
  float* rows = dw.as<float>();
#pragma omp parallel for schedule(static) num_threads(threads_)
  for (Index worker = 0; worker < workers; ++worker)
    for (Index n = 0; n < N; ++n) {
      if (token[n] % workers != worker) continue;
      float* row = rows + token[n] * d;
      const float* from = gradient + n * d;
#pragma omp simd
      for (Index i = 0; i < d; ++i) row[i] += from[i];
    }
}

// ---- linear maps ----

void CpuBackend::do_linear(Tensor y, Tensor x, Tensor w, bool accumulate) {
  const Index N = x.dim(0), m = w.dim(0), k = w.dim(1);
  if (N == 1) {
    constexpr Index part = 64;  // rows of w at a time
#pragma omp parallel for schedule(static) num_threads(threads_) if (m * k > worth_sharing)
    for (Index i = 0; i < m; i += part)
      matvec(std::min(part, m - i), k, 1, w.as<float>() + i * k, k, x.as<float>(), accumulate ? 1.0f : 0.0f,
             y.as<float>() + i);
    return;
  }
  tiled_gemm(threads_, N, m, k, 1, {x.as<float>(), k}, {w.as<float>(), k, true}, accumulate ? 1.0f : 0.0f,
             y.as<float>(), m);
}

void CpuBackend::do_linear_input_grad(Tensor dx, Tensor dy, Tensor w) {
  const Index N = dx.dim(0), m = w.dim(0), k = w.dim(1);
  tiled_gemm(threads_, N, k, m, 1, {dy.as<float>(), m}, {w.as<float>(), k}, 0, dx.as<float>(), k);
}

void CpuBackend::do_linear_weight_grad(Tensor dw, Tensor dy, Tensor x) {
  const Index N = x.dim(0), m = dw.dim(0), k = dw.dim(1);
  tiled_gemm(threads_, m, k, N, 1, {dy.as<float>(), m, true}, {x.as<float>(), k}, 1, dw.as<float>(), k);
}

// ---- RMSNorm: sums in double, so that only the rounding of the elements remains ----

namespace {

float reciprocal_rms(const float* x, Index n, double eps) {
  return static_cast<float>(1 / std::sqrt(square_sum(x, n) / static_cast<double>(n) + eps));
}

}  // namespace

void CpuBackend::do_rmsnorm(Tensor y, Tensor rstd, Tensor x, double eps) {
  const Index N = x.dim(0), d = x.dim(1);
  float *out = y.as<float>(), *scale = rstd.as<float>();
  const float* in = x.as<float>();
#pragma omp parallel for schedule(static) num_threads(threads_) if (N > 1)
  for (Index n = 0; n < N; ++n) {
    const float r = scale[n] = reciprocal_rms(in + n * d, d, eps);
#pragma omp simd
    for (Index i = 0; i < d; ++i) out[n * d + i] = in[n * d + i] * r;
  }
}

void CpuBackend::do_rmsnorm_backward(Tensor dx, Tensor dy, Tensor y, Tensor rstd) {
  const Index N = y.dim(0), d = y.dim(1);
  float* out = dx.as<float>();
  const float *gradient = dy.as<float>(), *normed = y.as<float>(), *scale = rstd.as<float>();
#pragma omp parallel for schedule(static) num_threads(threads_)
  for (Index n = 0; n < N; ++n) {
    const float *g = gradient + n * d, *z = normed + n * d, r = scale[n];
    const float mean = static_cast<float>(dot(g, z, d) / static_cast<double>(d));
#pragma omp simd
    for (Index i = 0; i < d; ++i) out[n * d + i] += r * (g[i] - z[i] * mean);
  }
}

// ---- RMSNorm of each head of q and k, then RoPE, in place ----

void CpuBackend::do_qk_norm_rope(Tensor qkv, Tensor rstd, Tensor rope, double eps) {
  const Index N = qkv.dim(0), width = qkv.dim(1), T = rope.dim(0), head_dim = rope.dim(1), half = head_dim / 2;
  const Index heads = rstd.dim(1);  // of q, then of k: adjacent in qkv too
  float *rows = qkv.as<float>(), *scales = rstd.as<float>();
  const float* table = rope.as<float>();
#pragma omp parallel for schedule(static) num_threads(threads_) if (N > 1)
  for (Index n = 0; n < N; ++n) {
    const float *cos = table + n % T * head_dim, *sin = cos + half;
    for (Index head = 0; head < heads; ++head) {
      float *first = rows + n * width + head * head_dim, *second = first + half;
      const float r = scales[n * heads + head] = reciprocal_rms(first, head_dim, eps);
#pragma omp simd
      for (Index i = 0; i < half; ++i) {
        const float a = first[i] * r, b = second[i] * r;
        first[i] = a * cos[i] - b * sin[i];
        second[i] = b * cos[i] + a * sin[i];
      }
    }
  }
}

// With z = R y, y = x rstd: dx = R^T [rstd (dz - z mean(dz z))].
void CpuBackend::do_qk_norm_rope_backward(Tensor dqkv, Tensor qkv, Tensor rstd, Tensor rope) {
  const Index N = qkv.dim(0), width = qkv.dim(1), T = rope.dim(0), head_dim = rope.dim(1), half = head_dim / 2;
  const Index heads = rstd.dim(1);
  float* gradients = dqkv.as<float>();
  const float *rows = qkv.as<float>(), *scales = rstd.as<float>(), *table = rope.as<float>();
#pragma omp parallel for schedule(static) num_threads(threads_)
  for (Index n = 0; n < N; ++n) {
    const float *cos = table + n % T * head_dim, *sin = cos + half;
    for (Index head = 0; head < heads; ++head) {
      float *first = gradients + n * width + head * head_dim, *second = first + half;
      const float *z = rows + n * width + head * head_dim, r = scales[n * heads + head];
      const float mean = static_cast<float>(dot(first, z, head_dim) / static_cast<double>(head_dim));
#pragma omp simd
      for (Index i = 0; i < half; ++i) {
        const float a = r * (first[i] - z[i] * mean), b = r * (second[i] - z[i + half] * mean);
        first[i] = a * cos[i] + b * sin[i];
        second[i] = b * cos[i] - a * sin[i];
      }
    }
  }
}

// ---- SwiGLU: y = silu(gate) up, silu(x) = x sigmoid(x) ----

void CpuBackend::do_swiglu(Tensor y, Tensor gate_up) {
  const Index N = y.dim(0), F = y.dim(1);
  float* out = y.as<float>();
  const float* in = gate_up.as<float>();
#pragma omp parallel for schedule(static) num_threads(threads_) if (N > 1)
  for (Index n = 0; n < N; ++n) {
    const float *gate = in + 2 * n * F, *up = gate + F;
#pragma omp simd
    for (Index i = 0; i < F; ++i) out[n * F + i] = gate[i] / (1 + exp_f32(-gate[i])) * up[i];
  }
}

// silu'(x) = sigmoid(x) (1 + x sigmoid(-x)). Both sigmoids without cancellation from one exponential: with
// e = exp(-|x|) they are 1 / (1 + e) and e / (1 + e), the larger for the positive argument.
void CpuBackend::do_swiglu_backward(Tensor dgate_up, Tensor dy, Tensor gate_up) {
  const Index N = dy.dim(0), F = dy.dim(1);
  float* out = dgate_up.as<float>();
  const float *gradient = dy.as<float>(), *in = gate_up.as<float>();
#pragma omp parallel for schedule(static) num_threads(threads_)
  for (Index n = 0; n < N; ++n) {
    const float *gate = in + 2 * n * F, *up = gate + F, *g = gradient + n * F;
    float *dgate = out + 2 * n * F, *dup = dgate + F;
#pragma omp simd
    for (Index i = 0; i < F; ++i) {
      const float x = gate[i], e = exp_f32(-std::fabs(x)), larger = 1 / (1 + e), smaller = e * larger;
      const float sigmoid = x < 0 ? smaller : larger, opposite = x < 0 ? larger : smaller;
      dgate[i] = g[i] * up[i] * sigmoid * (1 + x * opposite);
      dup[i] = g[i] * (x * sigmoid);
    }
  }
}

}  // namespace rownorm::cpu
