// D(S) = max_{i<j} ||s_i - s_j||_2 (PAPER 1, 5): all pairs are screened in f32, and every pair that the screen's
// rounding error leaves in doubt is evaluated in f64 on the stored values. What the screen drops cannot attain the
// maximum, so the result is that of the full search in f64, in whatever order and by however many threads it is found.
//
// The screen. Let y_i = t (s_i - c), c the mean row, t the power of two that brings the largest radius r_i = ||y_i||
// into [1, 2); neither changes which pair is the largest, and D t >= max r_i, because some row lies beyond the mean.
// Rows are taken by falling radius, a pair (p, q) with r_p >= r_q. The largest distance found so far, times t, is L.
//   (a) ||y_p - y_q|| <= r_p + r_q, so blocks of pairs with r_p + r_q < L are skipped.
//   (b) x_p is y_p rounded to f32: | ||x_p - x_q|| - ||y_p - y_q|| | <= u (r_p + r_q) <= 2 u r_p, u = 2^-24, so a pair
//       with ||y_p - y_q|| >= L has ||x_p - x_q||^2 / 2 >= T_p = max(0, L - 2 u r_p)^2 / 2.
//   (c) ||x_p - x_q||^2 / 2 = h_p + (h_q - x_p . x_q), h = ||x||^2 / 2. The product of d terms is summed in f32 in any
//       order, with or without fused multiply-add: error at most gamma_d r_p r_q, gamma_k = k u / (1 - k u) (Higham,
//       Accuracy and Stability of Numerical Algorithms, 3.1). Rounding h_q <= r_p r_q / 2 to f32 and the subtraction
//       in f32 add less than 3 u r_p r_q, alpha = 1 and ||x|| <= (1 + u) r the rest of gamma_(d+8).
// A pair is therefore a candidate unless fl(x_p . x_q) - fl(h_q) > h_p - T_p + gamma_(d+8) r_p r_q, the right side with
// its own f64 rounding added and rounded up to f32. Subnormal roundings, below d 2^-120 in all, are added too; in (b)
// they vanish beside u r_p, since r_p >= L / 2 and L >= 1/2 for every pair that (a) leaves.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "ops/cpu/cpu_backend.h"

namespace rownorm::cpu {

DiameterScratch::DiameterScratch(Arena& arena, int threads, Index vocab, Index width)
    : mean(arena.add("diameter", DType::f64, {width})),
      radius(arena.add("diameter", DType::f64, {vocab})),
      hash(arena.add("diameter", DType::i32, {vocab})),
      order(arena.add("diameter", DType::i32, {vocab})),
      centred(arena.add("diameter", DType::f32, {vocab, width})),
      half_square(arena.add("diameter", DType::f64, {vocab})),
      products(arena.add("diameter", DType::f32, {threads, block, block})) {}

namespace {

struct Pair {
  double square = 0;
  std::int32_t i = 0, j = 0;
};

bool precedes(const Pair& a, const Pair& b) {
  if (a.square != b.square) return a.square > b.square;
  return a.i != b.i ? a.i < b.i : a.j < b.j;
}

// The rows of s, and the largest distance found among them; (0, 0) and 0 until one is.
struct Rows {
  const float* data;
  Index width;

  const float* operator[](std::int32_t row) const { return data + row * width; }

  void compare(Pair& best, std::int32_t i, std::int32_t j) const {
    const float *a = (*this)[i], *b = (*this)[j];
    const double square = lane_sum(width, [a, b](Index k) {
      const double difference = static_cast<double>(a[k]) - static_cast<double>(b[k]);
      return difference * difference;
    });
    const Pair found{square, std::min(i, j), std::max(i, j)};
    if (square > 0 && precedes(found, best)) best = found;
  }
};

// FNV-1a over the values; adding zero makes -0 and 0 the same.
std::int32_t hash_of(const float* row, Index width) {
  std::uint64_t hash = 14695981039346656037u;
  for (Index i = 0; i < width; ++i) hash = (hash ^ std::bit_cast<std::uint32_t>(row[i] + 0.0f)) * 1099511628211u;
  return static_cast<std::int32_t>(static_cast<std::uint32_t>(hash >> 32));
}

// The first row with an element that is not finite; V if there is none.
Index first_non_finite(const Rows& rows, Index V, int threads) {
  Index first = V;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(min : first)
  for (Index i = 0; i < V; ++i) {
    const float* row = rows[static_cast<std::int32_t>(i)];
    const bool finite = lane_sum(rows.width, [row](Index k) { return static_cast<double>(row[k] * 0.0f); }) == 0;
    if (!finite) first = std::min(first, i);
  }
  return first;
}

// Of two equal rows only the first can be in the answer: a list of distinct rows by falling radius, in order[0..count).
Index order_distinct_rows(const Rows& rows, Index V, const double* radius, const std::int32_t* hash,
                          std::int32_t* order) {
  std::iota(order, order + V, 0);
  std::sort(order, order + V, [&](std::int32_t a, std::int32_t b) {
    if (radius[a] != radius[b]) return radius[a] > radius[b];
    return hash[a] != hash[b] ? hash[a] < hash[b] : a < b;
  });
  Index count = 0;
  for (Index p = 0; p < V; ++p) {
    const float* row = rows[order[p]];
    if (count > 0 && std::equal(row, row + rows.width, rows[order[count - 1]])) continue;
    order[count++] = order[p];
  }
  return count;
}

}  // namespace

void CpuBackend::do_row_diameter(Tensor distance, Tensor pair, Tensor s, Index share, Index shares) {
  const Index V = s.dim(0), d = s.dim(1);
  const Rows rows{s.as<float>(), d};
  const auto answer = [&](double value, std::int32_t i, std::int32_t j) {
    *distance.as<double>() = value;
    pair.as<std::int32_t>()[0] = i;
    pair.as<std::int32_t>()[1] = j;
  };
  if (const Index row = first_non_finite(rows, V, threads_); row < V)
    return answer(std::numeric_limits<double>::quiet_NaN(), static_cast<std::int32_t>(row),
                  static_cast<std::int32_t>(row));

  Arena arena = scratch();
  const DiameterScratch memory(arena, threads_, V, d);
  double *mean = memory.mean.as<double>(), *row_radius = memory.radius.as<double>();
  double* half_square = memory.half_square.as<double>();
  std::int32_t *hash = memory.hash.as<std::int32_t>(), *order = memory.order.as<std::int32_t>();
  float* centred = memory.centred.as<float>();

  do_column_sum(memory.mean, s);
  for (Index k = 0; k < d; ++k) mean[k] /= static_cast<double>(V);
#pragma omp parallel for schedule(static) num_threads(threads_)
  for (Index i = 0; i < V; ++i) {
    const float* row = rows[static_cast<std::int32_t>(i)];
    row_radius[i] = std::sqrt(lane_sum(d, [row, mean](Index k) {
      const double y = row[k] - mean[k];
      return y * y;
    }));
    hash[i] = hash_of(row, d);
  }
  const Index count = order_distinct_rows(rows, V, row_radius, hash, order);
  if (count < 2) return answer(0, 0, 0);

  const double t = std::ldexp(1.0, -std::ilogb(row_radius[order[0]]));
  const auto radius = [&](Index p) { return t * row_radius[order[p]]; };
#pragma omp parallel for schedule(static) num_threads(threads_)
  for (Index p = 0; p < count; ++p) {
    const float* row = rows[order[p]];
    float* x = centred + p * d;
    for (Index k = 0; k < d; ++k) x[k] = static_cast<float>(t * (row[k] - mean[k]));
    half_square[p] = square_sum(x, d) / 2;
  }

  // A good lower bound first: from the row farthest from the mean to the row farthest from it, and so on.
  Pair best;
  std::int32_t from = order[0];
  for (int walk = 0; walk < 8; ++walk) {
    Pair farthest = best;
#pragma omp parallel num_threads(threads_)
    {
      Pair mine = best;
#pragma omp for schedule(static) nowait
      for (Index p = 0; p < count; ++p) rows.compare(mine, from, order[p]);
#pragma omp critical
      if (precedes(mine, farthest)) farthest = mine;
    }
    if (!precedes(farthest, best)) break;
    best = farthest;
    from = from == best.i ? best.j : best.i;
  }

  constexpr double u = 0x1p-24;
  const double k = static_cast<double>(d) + 8, gamma = k * u / (1 - k * u), underflow = k * 0x1p-120;
  const double rounding = k * 0x1p-52;  // relative, of any sum of d squares in f64
  const auto lower_bound = [&](const Pair& found) { return t * std::sqrt(found.square) * (1 - 2 * rounding); };
  constexpr Index block = DiameterScratch::block;
  const Index blocks = (count + block - 1) / block;

  for (Index row_block = 0; row_block < blocks; ++row_block) {
    const Index p_begin = row_block * block, p_end = std::min(p_begin + block, count);
    Index column_blocks = row_block;  // end of those that (a) leaves
    while (column_blocks < blocks &&
           (radius(p_begin) + radius(column_blocks * block)) * (1 + 2 * rounding) >= lower_bound(best))
      ++column_blocks;
    if (column_blocks == row_block) break;

    const Pair before = best;
#pragma omp parallel num_threads(threads_)
    {
      Pair mine = before;
      float* products = memory.products.as<float>() + omp_get_thread_num() * block * block;
#pragma omp for schedule(dynamic) nowait
      for (Index column_block = row_block; column_block < column_blocks; ++column_block) {
        if ((row_block + column_block) % shares != share) continue;
        const Index q_begin = column_block * block, columns = std::min(q_begin + block, count) - q_begin;
        gemm(p_end - p_begin, columns, d, 1, {centred + p_begin * d, d}, {centred + q_begin * d, d, true}, 0, products,
             block);
        float h[block];
        for (Index q = 0; q < columns; ++q) h[q] = static_cast<float>(half_square[q_begin + q]);
        for (Index p = p_begin; p < p_end; ++p) {
          const double r_p = radius(p), r_q = std::min(r_p, radius(q_begin));
          const auto limit = [&] {
            const double below = std::max(0.0, lower_bound(mine) - 2 * u * (1 + 1e-6) * r_p);
            const double right =
                half_square[p] - below * below / 2 + gamma * r_p * r_q + rounding * r_p * r_p + underflow;
            return std::nextafter(static_cast<float>(right), std::numeric_limits<float>::infinity());
          };
          const float* row = products + (p - p_begin) * block;
          const Index first = row_block == column_block ? p - p_begin + 1 : 0;
          float highest = limit(), lowest = std::numeric_limits<float>::infinity();
#pragma omp simd reduction(min : lowest)
          for (Index q = first; q < columns; ++q) {
            const float value = row[q] - h[q];
            lowest = value < lowest ? value : lowest;
          }
          if (lowest > highest) continue;
          for (Index q = first; q < columns; ++q) {
            if (row[q] - h[q] > highest) continue;
            rows.compare(mine, order[p], order[q_begin + q]);
            highest = limit();
          }
        }
      }
#pragma omp critical
      if (precedes(mine, best)) best = mine;
    }
  }
  answer(std::sqrt(best.square), best.i, best.j);
}

void CpuBackend::do_row_norms(Tensor norms, Tensor s) {
  const Index V = s.dim(0), d = s.dim(1);
  double* out = norms.as<double>();
  const float* rows = s.as<float>();
#pragma omp parallel for schedule(static) num_threads(threads_)
  for (Index i = 0; i < V; ++i) out[i] = std::sqrt(square_sum(rows + i * d, d));
}

}  // namespace rownorm::cpu
