// Products with the head's matrix, a chunk of tokens at a time: the loss with its gradients, and the range of S h.
#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/cpu/cpu_backend.h"

namespace rownorm::cpu {

LogitsScratch::LogitsScratch(Arena& arena, Index tokens, Index vocab)
    : logits(arena.add("logits", DType::f32, {std::min(rows, tokens), vocab})) {}

// z = h w^T; ce_n = log sum_i exp(z_ni) - z_n,target; r = softmax(z_n) - onehot(target), in place of z;
// dh = scale r w, dw += scale r^T h.
void CpuBackend::do_head_loss(Tensor loss, Tensor dh, Tensor dw, Tensor h, Tensor w, Tensor targets, double scale) {
  const Index N = h.dim(0), V = w.dim(0), d = w.dim(1);
  const bool backward = dh.data != nullptr;
  Arena arena = scratch();
  float* z = LogitsScratch(arena, N, V).logits.as<float>();
  const std::int32_t* target = targets.as<std::int32_t>();
  double total = 0;

  for (Index begin = 0; begin < N; begin += LogitsScratch::rows) {
    const Index rows = std::min(LogitsScratch::rows, N - begin);
    const Operand hidden{h.as<float>() + begin * d, d};
    double losses[LogitsScratch::rows];
    tiled_gemm(threads_, rows, V, d, 1, hidden, {w.as<float>(), d, true}, 0, z, V);

#pragma omp parallel for schedule(static) num_threads(threads_)
    for (Index n = 0; n < rows; ++n) {
      float* row = z + n * V;
      const Index right = target[begin + n];
      const float highest = maximum(row, V);
      const double of_target = row[right];
#pragma omp simd
      for (Index i = 0; i < V; ++i) row[i] = exp_f32(row[i] - highest);
      const double sum = lane_sum(V, [row](Index i) { return static_cast<double>(row[i]); });
      losses[n] = highest + std::log(sum) - of_target;
      if (!backward) continue;
      const float factor = static_cast<float>(scale / sum);
#pragma omp simd
      for (Index i = 0; i < V; ++i) row[i] *= factor;
      row[right] -= static_cast<float>(scale);
    }
    for (Index n = 0; n < rows; ++n) total += losses[n];

    if (!backward) continue;
    tiled_gemm(threads_, rows, d, V, 1, {z, V}, {w.as<float>(), d}, 0, dh.as<float>() + begin * d, d);
    tiled_gemm(threads_, V, d, rows, 1, {z, V, true}, hidden, 1, dw.as<float>(), d);
  }
  *loss.as<double>() += scale * total;
}

void CpuBackend::do_row_range(Tensor lowest, Tensor highest, Tensor h, Tensor s) {
  const Index P = h.dim(0), V = s.dim(0), d = s.dim(1);
  Arena arena = scratch();
  float* z = LogitsScratch(arena, P, V).logits.as<float>();
  float *low = lowest.as<float>(), *high = highest.as<float>();
  for (Index begin = 0; begin < P; begin += LogitsScratch::rows) {
    const Index rows = std::min(LogitsScratch::rows, P - begin);
    if (V > 0) tiled_gemm(threads_, rows, V, d, 1, {h.as<float>() + begin * d, d}, {s.as<float>(), d, true}, 0, z, V);
#pragma omp parallel for schedule(static) num_threads(threads_)
    for (Index n = 0; n < rows; ++n) {
      const float* row = z + n * V;
      float smallest = std::numeric_limits<float>::infinity(), largest = -smallest;
      int not_a_number = 0;
#pragma omp simd reduction(min : smallest) reduction(max : largest) reduction(| : not_a_number)
      for (Index i = 0; i < V; ++i) {
        smallest = row[i] < smallest ? row[i] : smallest;
        largest = row[i] > largest ? row[i] : largest;
        not_a_number |= row[i] != row[i];
      }
      low[begin + n] = not_a_number ? std::numeric_limits<float>::quiet_NaN() : smallest;
      high[begin + n] = not_a_number ? std::numeric_limits<float>::quiet_NaN() : largest;
    }
  }
}

}  // namespace rownorm::cpu
