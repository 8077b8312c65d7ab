// Causal attention by tiles of query rows: a tile's scores exist only against the keys up to its last row, in scratch
// of the thread that has the (sequence, head).
#include <omp.h>

#include <algorithm>
#include <cmath>

#include "ops/cpu/cpu_backend.h"

namespace rownorm::cpu {

AttentionScratch::AttentionScratch(Arena& arena, int threads, Index context)
    : probabilities(arena.add("attention", DType::f32, {threads, std::min(rows, context), context})),
      gradients(arena.add("attention", DType::f32, {threads, std::min(rows, context), context})) {}

// s_ij = q_i . k_j / sqrt(head_dim), j <= i; lse_i = log sum_j exp(s_ij); att_i = sum_j exp(s_ij - lse_i) v_j.
void CpuBackend::do_attention(Tensor att, Tensor lse, Tensor qkv, Index context) {
  const Index N = att.dim(0), d = att.dim(1), H = lse.dim(1), head_dim = d / H, T = context;
  const float scale = static_cast<float>(1 / std::sqrt(static_cast<double>(head_dim)));
  Arena arena = scratch();
  const AttentionScratch memory(arena, threads_, T);
  const Index tile_size = memory.probabilities.dim(1) * T;
  float *out = att.as<float>(), *log_sums = lse.as<float>(), *tiles = memory.probabilities.as<float>();
  const float* in = qkv.as<float>();

#pragma omp parallel for schedule(static) num_threads(threads_)
  for (Index task = 0; task < N / T * H; ++task) {
    const Index first = task / H * T, head = task % H;
    const float *q = in + first * 3 * d + head * head_dim, *k = q + d, *v = q + 2 * d;
    float* p = tiles + omp_get_thread_num() * tile_size;
    for (Index begin = 0; begin < T; begin += AttentionScratch::rows) {
      const Index end = std::min(begin + AttentionScratch::rows, T);  // of the tile's rows, and of the keys it sees
      gemm(end - begin, end, head_dim, scale, {q + begin * 3 * d, 3 * d}, {k, 3 * d, true}, 0, p, T);
      float* att_tile = out + (first + begin) * d + head * head_dim;
      double sums[AttentionScratch::rows];
      for (Index i = begin; i < end; ++i) {
        float* row = p + (i - begin) * T;
        const float highest = maximum(row, i + 1);
#pragma omp simd
        for (Index j = 0; j <= i; ++j) row[j] = exp_f32(row[j] - highest);
        std::fill(row + i + 1, row + end, 0.0f);
        const double sum = sums[i - begin] = lane_sum(i + 1, [row](Index j) { return static_cast<double>(row[j]); });
        log_sums[(first + i) * H + head] = static_cast<float>(highest + std::log(sum));
      }
      gemm(end - begin, head_dim, end, 1, {p, T}, {v, 3 * d}, 0, att_tile, d);
      for (Index i = 0; i < end - begin; ++i) {
        const float normalizer = static_cast<float>(1 / sums[i]);
        for (Index c = 0; c < head_dim; ++c) att_tile[i * d + c] *= normalizer;
      }
    }
  }
}

// The new keys and values join the cache; then each (row, head) reads the rows of the cache that it sees.
void CpuBackend::do_cached_attention(Tensor att, Tensor keys, Tensor values, Tensor qkv, Index position,
                                     Index head_dim) {
  const Index N = att.dim(0), d = att.dim(1), H = d / head_dim, T = keys.dim(0);
  const float scale = static_cast<float>(1 / std::sqrt(static_cast<double>(head_dim)));
  Arena arena = scratch();
  const AttentionScratch memory(arena, threads_, T);
  const Index tile_size = memory.probabilities.dim(1) * T;
  float *out = att.as<float>(), *k = keys.as<float>(), *v = values.as<float>();
  float* tiles = memory.probabilities.as<float>();
  const float* in = qkv.as<float>();
  for (Index n = 0; n < N; ++n) {
    std::copy_n(in + (3 * n + 1) * d, d, k + (position + n) * d);
    std::copy_n(in + (3 * n + 2) * d, d, v + (position + n) * d);
  }

#pragma omp parallel for schedule(static) num_threads(threads_) if (N * d * (position + N) > worth_sharing)
  for (Index task = 0; task < N * H; ++task) {
    const Index n = task / H, first = task % H * head_dim, count = position + n + 1;
    float *p = tiles + omp_get_thread_num() * tile_size, *att_row = out + n * d + first;
    matvec(count, head_dim, scale, k + first, d, in + 3 * n * d + first, 0, p);
    const float highest = maximum(p, count);
#pragma omp simd
    for (Index j = 0; j < count; ++j) p[j] = exp_f32(p[j] - highest);
    const double sum = lane_sum(count, [p](Index j) { return static_cast<double>(p[j]); });
    std::fill_n(att_row, head_dim, 0.0f);
    for (Index j = 0; j < count; ++j) {
      const float* v_row = v + j * d + first;
#pragma omp simd
      for (Index c = 0; c < head_dim; ++c) att_row[c] += p[j] * v_row[c];
    }
    const float normalizer = static_cast<float>(1 / sum);
    for (Index c = 0; c < head_dim; ++c) att_row[c] *= normalizer;
  }
}

// p_ij = exp(s_ij - lse_i); dv_j = sum_i p_ij datt_i; ds_ij = p_ij (datt_i . v_j - datt_i . att_i);
// dq_i = sum_j ds_ij k_j / sqrt(head_dim); dk_j = sum_i ds_ij q_i / sqrt(head_dim).
// The last tile sees every key: taken first, it writes all of dk and dv, and the others add.
void CpuBackend::do_attention_backward(Tensor dqkv, Tensor datt, Tensor att, Tensor lse, Tensor qkv, Index context) {
  const Index N = att.dim(0), d = att.dim(1), H = lse.dim(1), head_dim = d / H, T = context;
  const float scale = static_cast<float>(1 / std::sqrt(static_cast<double>(head_dim)));
  Arena arena = scratch();
  const AttentionScratch memory(arena, threads_, T);
  const Index tile_size = memory.probabilities.dim(1) * T;
  float *gradients = dqkv.as<float>(), *p_tiles = memory.probabilities.as<float>();
  float* ds_tiles = memory.gradients.as<float>();
  const float *in = qkv.as<float>(), *log_sums = lse.as<float>(), *out = att.as<float>(), *dout = datt.as<float>();

#pragma omp parallel for schedule(static) num_threads(threads_)
  for (Index task = 0; task < N / T * H; ++task) {
    const Index first = task / H * T, head = task % H;
    const float *q = in + first * 3 * d + head * head_dim, *k = q + d, *v = q + 2 * d;
    float *dq = gradients + first * 3 * d + head * head_dim, *dk = dq + d, *dv = dq + 2 * d;
    float *p = p_tiles + omp_get_thread_num() * tile_size, *ds = ds_tiles + omp_get_thread_num() * tile_size;
    const Index last = (T - 1) / AttentionScratch::rows * AttentionScratch::rows;
    for (Index begin = last; begin >= 0; begin -= AttentionScratch::rows) {
      const Index end = std::min(begin + AttentionScratch::rows, T), rows = end - begin;
      const float* dout_tile = dout + (first + begin) * d + head * head_dim;
      const float* out_tile = out + (first + begin) * d + head * head_dim;
      const float beta = begin == last ? 0.0f : 1.0f;
      gemm(rows, end, head_dim, scale, {q + begin * 3 * d, 3 * d}, {k, 3 * d, true}, 0, p, T);
      gemm(rows, end, head_dim, 1, {dout_tile, d}, {v, 3 * d, true}, 0, ds, T);
      for (Index i = begin; i < end; ++i) {
        float *p_row = p + (i - begin) * T, *ds_row = ds + (i - begin) * T;
        const float log_sum = log_sums[(first + i) * H + head];
        const float dout_out =
            static_cast<float>(dot(dout_tile + (i - begin) * d, out_tile + (i - begin) * d, head_dim));
#pragma omp simd
        for (Index j = 0; j <= i; ++j) {
          p_row[j] = exp_f32(p_row[j] - log_sum);
          ds_row[j] = p_row[j] * (ds_row[j] - dout_out);
        }
        std::fill(p_row + i + 1, p_row + end, 0.0f);
        std::fill(ds_row + i + 1, ds_row + end, 0.0f);
      }
      gemm(rows, head_dim, end, scale, {ds, T}, {k, 3 * d}, 0, dq + begin * 3 * d, 3 * d);
      gemm(end, head_dim, rows, scale, {ds, T, true}, {q + begin * 3 * d, 3 * d}, beta, dk, 3 * d);
      gemm(end, head_dim, rows, 1, {p, T, true}, {dout_tile, d}, beta, dv, 3 * d);
    }
  }
}

}  // namespace rownorm::cpu
