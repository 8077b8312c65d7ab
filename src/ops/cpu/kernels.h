// Inner loops that the operations of the CPU backend share. The order of every sum is fixed, so no result depends on
// the alignment of a buffer or on the number of threads.
#pragma once
#include <bit>
#include <cstdint>

namespace rownorm::cpu {

using Index = std::int64_t;

// e^x to 1e-7 relative, subnormal results included; 0 below -104, inf above 88.8, NaN for NaN. Branch-free, so that
// loops over it vectorise (glibc's expf does not without -ffast-math).
// x = n ln 2 + r with |r| <= ln(2)/2; polynomial of e^r from Cephes, expf.c (Moshier).
inline float exp_f32(float x) {
  constexpr float log2_e = 1.44269504088896341f, ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
  constexpr float round = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, kept in the low bits
  x = x < -104.0f ? -104.0f : x;
  x = x > 89.0f ? 89.0f : x;
  const float shifted = x * log2_e + round;
  const float n = shifted - round;
  const float r = (x - n * ln2_high) - n * ln2_low;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  // 2^n in two normal factors: n runs from -150 to 128
  const std::int32_t whole = std::bit_cast<std::int32_t>(shifted) - std::bit_cast<std::int32_t>(round);
  const std::int32_t half = whole >> 1;
  const auto power = [](std::int32_t e) { return std::bit_cast<float>(static_cast<std::uint32_t>(e + 127) << 23); };
  return p * power(half) * power(whole - half);
}

// sum of term(i), i < n, in double: 16 partial sums, element i in sum i % 16, folded in halves.
template <class Term>
inline double lane_sum(Index n, Term term) {
  constexpr Index width = 16;
  double lanes[width] = {};
  Index i = 0;
  for (; i + width <= n; i += width)
    for (Index lane = 0; lane < width; ++lane) lanes[lane] += term(i + lane);
  for (Index lane = 0; i < n; ++i, ++lane) lanes[lane] += term(i);
  for (Index half = width / 2; half > 0; half /= 2)
    for (Index lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

inline double square_sum(const float* x, Index n) {
  return lane_sum(n, [x](Index i) {
    const double value = x[i];
    return value * value;
  });
}

inline double dot(const float* x, const float* y, Index n) {
  return lane_sum(n, [x, y](Index i) { return static_cast<double>(x[i]) * static_cast<double>(y[i]); });
}

// The largest element that is a number; -inf if there is none.
inline float maximum(const float* x, Index n) {
  float highest = -__builtin_inff();
#pragma omp simd reduction(max : highest)
  for (Index i = 0; i < n; ++i) highest = x[i] > highest ? x[i] : highest;
  return highest;
}

struct Operand {
  const float* data;
  Index stride;             // elements from one stored row to the next
  bool transposed = false;  // the operand is the transpose of what is stored
};

// c(m,n) = alpha a(m,k) b(k,n) + beta c by OpenBLAS, c not read when beta is 0. gemm works on the calling thread alone
// (inside a parallel region OpenBLAS does so by itself). tiled_gemm deals tiles of c out to the threads: the tiles do
// not depend on their number, so neither does the result, and unlike OpenBLAS's own threads, which wait for each other
// many times in a product, none stalls when another loses its core.
void gemm(Index m, Index n, Index k, float alpha, Operand a, Operand b, float beta, float* c, Index c_stride);
void tiled_gemm(int threads, Index m, Index n, Index k, float alpha, Operand a, Operand b, float beta, float* c,
                Index c_stride);

// y_i = alpha w_i . x + beta y_i for the m rows of w, of k elements each, `stride` apart; y not read when beta is 0. On
// the calling thread: one row of a batch reuses nothing, so w is read once, in order, at the speed of memory.
void matvec(Index m, Index k, float alpha, const float* w, Index stride, const float* x, float beta, float* y);

// Multiply-adds below which waking other threads takes longer than the work itself.
inline constexpr Index worth_sharing = 1 << 18;

}  // namespace rownorm::cpu
