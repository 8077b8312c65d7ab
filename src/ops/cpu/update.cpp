// The update: norm and clip, momentum, AdamW, RowNorm and Newton-Schulz (PAPER 4).
#include <omp.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>

#include "ops/cpu/cpu_backend.h"

namespace rownorm::cpu {

void CpuBackend::do_squared_norm(Tensor sum, Tensor x) {
  constexpr Index parts = 256;  // whatever the number of threads, so that the sum does not depend on it
  std::array<double, parts> partial;
  const Index size = x.size();
  const float* in = x.as<float>();
#pragma omp parallel for schedule(static) num_threads(threads_)
  for (Index part = 0; part < parts; ++part) {
    const Index begin = size * part / parts, end = size * (part + 1) / parts;
    partial[static_cast<std::size_t>(part)] = square_sum(in + begin, end - begin);
  }
  *sum.as<double>() += std::accumulate(partial.begin(), partial.end(), 0.0);
}

void CpuBackend::do_clip(const UpdateControl& control, Tensor squares, Tensor loss, double max_norm) {
  const double norm = std::sqrt(*squares.as<double>());
  const bool ok = *control.ok.as<std::int32_t>() && std::isfinite(*loss.as<double>()) && std::isfinite(norm);
  *control.norm.as<double>() = norm;
  *control.clip.as<double>() = ok ? std::min(1.0, max_norm / (norm + 1e-6)) : 0;
  *control.ok.as<std::int32_t>() = ok;
}

void CpuBackend::do_momentum(Tensor out, Tensor buffer, Tensor grad, const UpdateControl& control, const Momentum& m) {
  if (!*control.ok.as<std::int32_t>()) return do_fill(out, 0);
  const auto clip = static_cast<float>(*control.clip.as<double>());
  const auto decay = static_cast<float>(m.decay), grad_in = static_cast<float>(m.grad_in);
  const auto buffer_out = static_cast<float>(m.buffer_out), grad_out = static_cast<float>(m.grad_out);
  const Index size = grad.size();
  float *result = out.as<float>(), *state = buffer.as<float>();
  const float* gradient = grad.as<float>();
#pragma omp parallel for simd schedule(static) num_threads(threads_)
  for (Index i = 0; i < size; ++i) {
    const float g = clip * gradient[i];
    state[i] = decay * state[i] + grad_in * g;
    result[i] = buffer_out * state[i] + grad_out * g;
  }
}

// m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2, mhat = m / (1 - b1^t), vhat = v / (1 - b2^t).
void CpuBackend::do_adamw(Tensor step, Tensor exp_avg, Tensor exp_avg_sq, Tensor grad, Tensor lr,
                          const UpdateControl& control, const AdamWHyper& hyper, Index t) {
  if (!*control.ok.as<std::int32_t>()) return do_fill(step, 0);
  const double correction1 = 1 - std::pow(hyper.beta1, t), correction2 = 1 - std::pow(hyper.beta2, t);
  const auto clip = static_cast<float>(*control.clip.as<double>());
  const auto beta1 = static_cast<float>(hyper.beta1), in1 = static_cast<float>(1 - hyper.beta1);
  const auto beta2 = static_cast<float>(hyper.beta2), in2 = static_cast<float>(1 - hyper.beta2);
  const auto rate = static_cast<float>(-*lr.as<double>() / correction1), eps = static_cast<float>(hyper.eps);
  const auto to_vhat = static_cast<float>(1 / correction2);
  const Index size = grad.size();
  float *increment = step.as<float>(), *m = exp_avg.as<float>(), *v = exp_avg_sq.as<float>();
  const float* gradient = grad.as<float>();
#pragma omp parallel for simd schedule(static) num_threads(threads_)
  for (Index i = 0; i < size; ++i) {
    const float g = clip * gradient[i];
    m[i] = beta1 * m[i] + in1 * g;
    v[i] = beta2 * v[i] + in2 * (g * g);
    increment[i] = rate * m[i] / (std::sqrt(v[i] * to_vhat) + eps);
  }
}

// ---- Newton-Schulz ----

NewtonSchulzScratch::NewtonSchulzScratch(Arena& arena, int threads, Index matrices, Index short_side, Index long_side) {
  const Index parallel = matrices < threads ? 1 : threads;
  gram = arena.add("newton_schulz", DType::f32, {parallel, short_side, short_side});
  polynomial = arena.add("newton_schulz", DType::f32, {parallel, short_side, short_side});
  previous = arena.add("newton_schulz", DType::f32, {parallel, short_side, long_side});
}

namespace {

// x(m,n) in place, with scratch part `part` and `threads` threads. For m <= n: A = x x^T, x = a x + (b A + c A A) x.
// For m > n the same on the transpose: A = x^T x, x = a x + x (b A + c A A).
void orthogonalize(Tensor matrix, const NewtonSchulzScratch& memory, Index part, int threads, int steps, double eps) {
  const Index m = matrix.dim(0), n = matrix.dim(1), side = std::min(m, n), size = m * n;
  const bool tall = m > n;
  float* x = matrix.as<float>();
  float* gram = memory.gram.as<float>() + part * side * side;
  float* polynomial = memory.polynomial.as<float>() + part * side * side;
  float* previous = memory.previous.as<float>() + part * size;
  constexpr auto a = static_cast<float>(newton_schulz_a), b = static_cast<float>(newton_schulz_b),
                 c = static_cast<float>(newton_schulz_c);

  const double norm = std::sqrt(square_sum(x, size));
  if (norm == 0) return;
  const double normalizer = 1 / (norm + eps);
  for (Index i = 0; i < size; ++i) x[i] = static_cast<float>(x[i] * normalizer);
  for (int step = 0; step < steps; ++step) {
    std::memcpy(previous, x, static_cast<std::size_t>(size) * sizeof(float));
    tiled_gemm(threads, side, side, tall ? m : n, 1, {previous, n, tall}, {previous, n, !tall}, 0, gram, side);
    std::memcpy(polynomial, gram, static_cast<std::size_t>(side * side) * sizeof(float));
    tiled_gemm(threads, side, side, side, c, {gram, side}, {gram, side}, b, polynomial, side);
    if (tall)
      tiled_gemm(threads, m, n, n, 1, {previous, n}, {polynomial, n}, a, x, n);
    else
      tiled_gemm(threads, m, n, m, 1, {polynomial, m}, {previous, n}, a, x, n);
  }
}

}  // namespace

// As many matrices as fill all threads are taken one a thread, the rest one after another by all threads.
void CpuBackend::do_newton_schulz(std::span<const Tensor> matrices, int steps, double eps, NewtonSchulzPrecision) {
  const Index count = static_cast<Index>(matrices.size()), shared = count - count % threads_;
  const Index m = matrices[0].dim(0), n = matrices[0].dim(1);
  Arena arena = scratch();
  const NewtonSchulzScratch memory(arena, threads_, count, std::min(m, n), std::max(m, n));
#pragma omp parallel for schedule(static) num_threads(threads_)
  for (Index i = 0; i < shared; ++i)
    orthogonalize(matrices[static_cast<std::size_t>(i)], memory, omp_get_thread_num(), 1, steps, eps);
  for (Index i = shared; i < count; ++i)
    orthogonalize(matrices[static_cast<std::size_t>(i)], memory, 0, threads_, steps, eps);
}

// ---- rows of the head ----

void CpuBackend::do_row_normalize(Tensor x, double eps) {
  const Index V = x.dim(0), d = x.dim(1);
  float* rows = x.as<float>();
#pragma omp parallel for schedule(static) num_threads(threads_)
  for (Index i = 0; i < V; ++i) {
    float* row = rows + i * d;
    const double norm = std::sqrt(square_sum(row, d));
    if (norm == 0) continue;
    const double normalizer = 1 / (norm + eps);
    for (Index j = 0; j < d; ++j) row[j] = static_cast<float>(row[j] * normalizer);
  }
}

void CpuBackend::do_scale(Tensor x, Tensor factor, double c) {
  const double by = *factor.as<double>() * c;
  const Index size = x.size();
  float* values = x.as<float>();
#pragma omp parallel for simd schedule(static) num_threads(threads_)
  for (Index i = 0; i < size; ++i) values[i] = static_cast<float>(values[i] * by);
}

// Each task has some columns and sums them over all rows, in order.
void CpuBackend::do_column_sum(Tensor sum, Tensor x) {
  constexpr Index width = 64;
  const Index V = x.dim(0), d = x.dim(1);
  double* sums = sum.as<double>();
  const float* rows = x.as<float>();
#pragma omp parallel for schedule(static) num_threads(threads_)
  for (Index begin = 0; begin < d; begin += width) {
    const Index columns = std::min(width, d - begin);
    double partial[width] = {};
    for (Index i = 0; i < V; ++i)
      for (Index j = 0; j < columns; ++j) partial[j] += rows[i * d + begin + j];
    std::copy_n(partial, columns, sums + begin);
  }
}

void CpuBackend::do_subtract_row(Tensor x, Tensor row, double c) {
  const Index V = x.dim(0), d = x.dim(1);
  float* rows = x.as<float>();
  const double* subtracted = row.as<double>();
#pragma omp parallel for schedule(static) num_threads(threads_)
  for (Index i = 0; i < V; ++i)
    for (Index j = 0; j < d; ++j) rows[i * d + j] = static_cast<float>(rows[i * d + j] - c * subtracted[j]);
}

void CpuBackend::do_apply_step(Tensor w, Tensor step, Tensor lr, double weight_decay, const UpdateControl& control) {
  if (!*control.ok.as<std::int32_t>()) return;
  const double keep = 1 - *lr.as<double>() * weight_decay;
  const Index size = w.size();
  float* weights = w.as<float>();
  const float* increment = step.as<float>();
#pragma omp parallel for simd schedule(static) num_threads(threads_)
  for (Index i = 0; i < size; ++i)
    weights[i] = static_cast<float>(keep * weights[i] + static_cast<double>(increment[i]));
}

}  // namespace rownorm::cpu
