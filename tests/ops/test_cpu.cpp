// The CPU backend against the reference, operation by operation: the same calls are made on both, on the same values
// (rounded to f32), and on the CPU with several numbers of threads and alignments, which must give the same bits.
// A new operation: one Calls function that makes tensors, calls it and hands its outputs to result().
#include <cblas.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <omp.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "golden.h"
#include "ops/bench.h"
#include "ops/cpu/kernels.h"
#include "ops/open.h"

namespace rownorm {
namespace {

using Index = std::int64_t;

constexpr float nan = std::numeric_limits<float>::quiet_NaN(), infinity = std::numeric_limits<float>::infinity();
constexpr double u = 0x1p-24;  // half an ulp of f32

// Relative L2 error of sums of n products of random sign, or of n elementwise operations in a row: n independent
// roundings add up to sqrt(n) u, each at most u and half of that on average; x2 for the spread of small samples.
double bound(Index n) { return 2 * u * std::sqrt(static_cast<double>(n)); }

// What f32 holds exactly.
Values f32_normals(Index n, unsigned seed, double deviation = 1) {
  Values values = normals(n, seed, deviation);
  for (double& v : values) v = static_cast<float>(v);
  return values;
}

// A backend and the tensors of one test. Every tensor lies between guards, all bytes of which are 0xff: a NaN, which an
// overrun reads or overwrites. Outputs start as NaN too, so that an element that is not written shows.
class World {
 public:
  World(std::unique_ptr<Backend> backend, const WorkspaceSizes& sizes, std::size_t shift = 0)
      : be(std::move(backend)), shift_(shift) {
    be->set_workspace(make(DType::u8, {be->workspace_bytes(sizes)}), sizes);
  }

  std::unique_ptr<Backend> be;

  Tensor make(DType dtype, Shape shape) {
    Tensor t{nullptr, dtype, shape};
    memory_.emplace_back(static_cast<std::size_t>(t.bytes()) + 2 * guard + shift_, static_cast<unsigned char>(0xff));
    t.data = memory_.back().data() + guard + shift_;
    tensors_.push_back(t);
    return t;
  }
  Tensor output(Shape shape) { return make(be->master_dtype(), shape); }
  Tensor input(Shape shape, const Values& values) {
    const Tensor t = output(shape);
    EXPECT_EQ(t.size(), static_cast<Index>(values.size()));
    be->copy(t, Tensor{const_cast<double*>(values.data()), DType::f64, shape});
    return t;
  }
  Tensor ids(const std::vector<std::int32_t>& values) {
    const Tensor t = make(DType::i32, {static_cast<Index>(values.size())});
    be->upload(t, values.data());
    return t;
  }
  Tensor doubles(const Values& values) {
    const Tensor t = make(DType::f64, {static_cast<Index>(values.size())});
    be->upload(t, values.data());
    return t;
  }
  UpdateControl control(double clip = 1) { return {doubles({1}), doubles({clip}), ids({1})}; }

  void result(Tensor t) { results_.push_back(t); }

  std::vector<Values> results() {
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      const auto& bytes = memory_[i];
      const auto is_guard = [](unsigned char byte) { return byte == 0xff; };
      const auto begin = bytes.begin() + static_cast<Index>(guard + shift_);
      EXPECT_TRUE(std::all_of(bytes.begin(), begin, is_guard)) << "written before tensor " << tensors_[i].str();
      EXPECT_TRUE(std::all_of(begin + tensors_[i].bytes(), bytes.end(), is_guard))
          << "written past tensor " << tensors_[i].str();
    }
    std::vector<Values> all;
    for (const Tensor& t : results_) {
      Values values(static_cast<std::size_t>(t.size()));
      if (t.dtype == DType::i32)
        std::copy_n(t.as<std::int32_t>(), t.size(), values.begin());
      else
        be->copy(Tensor{values.data(), DType::f64, t.shape}, t);
      all.push_back(values);
    }
    return all;
  }

 private:
  static constexpr std::size_t guard = 256;
  std::size_t shift_;
  std::vector<std::vector<unsigned char>> memory_;
  std::vector<Tensor> tensors_, results_;
};

using Calls = std::function<void(World&)>;

std::vector<Values> on_reference(const Calls& calls, const WorkspaceSizes& sizes) {
  World world(make_reference_backend(), sizes);
  calls(world);
  return world.results();
}

std::vector<Values> on_cpu(const Calls& calls, const WorkspaceSizes& sizes, int threads, std::size_t shift = 0) {
  const int before = omp_get_max_threads();
  omp_set_num_threads(threads);
  World world(make_cpu_backend(), sizes, shift);
  calls(world);
  auto results = world.results();
  omp_set_num_threads(before);
  return results;
}

bool same_bits(const std::vector<Values>& a, const std::vector<Values>& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i)
    if (a[i].size() != b[i].size() ||
        (!a[i].empty() && std::memcmp(a[i].data(), b[i].data(), a[i].size() * sizeof(double)) != 0))
      return false;
  return true;
}

// bounds: relative L2, one a result.
void compare(const Calls& calls, const WorkspaceSizes& sizes, const std::vector<double>& bounds) {
  const auto expected = on_reference(calls, sizes), actual = on_cpu(calls, sizes, 1);
  ASSERT_EQ(actual.size(), bounds.size());
  for (std::size_t i = 0; i < bounds.size(); ++i)
    EXPECT_LE(golden::relative_l2(actual[i], expected[i]), bounds[i]) << "result " << i;
  for (const int threads : {1, 2, 3, 7}) {
    EXPECT_TRUE(same_bits(on_cpu(calls, sizes, threads), actual)) << threads << " threads";
    EXPECT_TRUE(same_bits(on_cpu(calls, sizes, threads, 8), actual)) << threads << " threads, other alignment";
  }
}

// Where the reference is not a number, neither is the CPU's result; where it is infinite, the CPU's is not finite.
void compare_non_finite(const Calls& calls, const WorkspaceSizes& sizes) {
  const auto expected = on_reference(calls, sizes), actual = on_cpu(calls, sizes, 2);
  std::size_t count = 0;
  for (std::size_t i = 0; i < expected.size(); ++i)
    for (std::size_t j = 0; j < expected[i].size(); ++j) {
      if (std::isfinite(expected[i][j])) continue;
      ++count;
      EXPECT_FALSE(std::isfinite(actual[i][j])) << "result " << i << ", element " << j;
      if (std::isnan(expected[i][j])) {
        EXPECT_TRUE(std::isnan(actual[i][j])) << "result " << i << ", element " << j;
      }
    }
  EXPECT_GT(count, 0u);
}

// ---- kernels ----

TEST(Exp, IsAccurateOverItsRange) {
  double worst = 0, worst_subnormal = 0;
  for (float sign : {1.0f, -1.0f})
    for (std::uint32_t bits = 0; bits < std::bit_cast<std::uint32_t>(110.0f); bits += 611) {
      const float x = sign * std::bit_cast<float>(bits), y = cpu::exp_f32(x);
      const double exact = std::exp(static_cast<double>(x));
      if (exact > static_cast<double>(std::numeric_limits<float>::max()) * (1 + u))
        EXPECT_EQ(y, infinity) << x;
      else if (exact >= static_cast<double>(std::numeric_limits<float>::min()))
        worst = std::max(worst, std::abs(y - exact) / exact);
      else
        worst_subnormal = std::max(worst_subnormal, std::abs(y - exact));
    }
  EXPECT_LE(worst, 2 * u);               // the polynomial's last operations round twice
  EXPECT_LE(worst_subnormal, 0x1p-149);  // one unit of the last place there is
  EXPECT_EQ(cpu::exp_f32(0), 1.0f);
  EXPECT_EQ(cpu::exp_f32(-0.0f), 1.0f);
  EXPECT_EQ(cpu::exp_f32(-105), 0.0f);
  EXPECT_EQ(cpu::exp_f32(-infinity), 0.0f);
  EXPECT_EQ(cpu::exp_f32(infinity), infinity);
  EXPECT_TRUE(std::isnan(cpu::exp_f32(nan)));
}

TEST(Sums, CoverEveryElementAndNotANumber) {
  for (Index n : {0, 1, 15, 16, 17, 33, 100}) {
    std::vector<float> x(static_cast<std::size_t>(n));
    for (Index i = 0; i < n; ++i) x[static_cast<std::size_t>(i)] = static_cast<float>(i + 1);
    EXPECT_EQ(cpu::square_sum(x.data(), n), static_cast<double>(n * (n + 1) * (2 * n + 1) / 6));
    EXPECT_EQ(cpu::maximum(x.data(), n), n == 0 ? -infinity : static_cast<float>(n));
    if (n == 0) continue;
    x.back() = nan;
    EXPECT_TRUE(std::isnan(cpu::dot(x.data(), x.data(), n)));
  }
}

// ---- the model ----

TEST(Cpu, Embedding) {
  for (auto [N, V, d] : {std::array<Index, 3>{1, 3, 1}, {65, 7, 33}, {300, 40, 128}})
    compare(
        [&, N = N, V = V, d = d](World& w) {
          const Tensor tokens = w.ids(random_ids(N, V, 1)), y = w.output({N, d});
          const Tensor dw = w.input({V, d}, f32_normals(V * d, 2));
          w.be->embedding(y, tokens, w.input({V, d}, f32_normals(V * d, 3)));
          w.be->embedding_backward(dw, tokens, w.input({N, d}, f32_normals(N * d, 4)));
          w.result(y);
          w.result(dw);
        },
        {}, {0, bound(1 + N / V)});
}

TEST(Cpu, RmsNorm) {
  for (auto [N, d] : {std::array<Index, 2>{1, 1}, {5, 3}, {33, 130}, {2, 1024}})
    compare(
        [N = N, d = d](World& w) {
          const Tensor y = w.output({N, d}), rstd = w.output({N}), dx = w.input({N, d}, f32_normals(N * d, 1));
          w.be->rmsnorm(y, rstd, w.input({N, d}, f32_normals(N * d, 2, 3)), 1e-6);
          w.be->rmsnorm_backward(dx, w.input({N, d}, f32_normals(N * d, 3)), y, rstd);
          w.result(y);
          w.result(rstd);
          w.result(dx);
        },
        {}, {bound(1), bound(1), bound(4)});  // sums are in double: only elements round
}

TEST(Cpu, Linear) {
  for (auto [N, m, k] : {std::array<Index, 3>{2, 3, 1},
                         {1, 5, 300},
                         {1, 67, 3},
                         {1, 523, 517},
                         {33, 65, 31},
                         {257, 130, 70},
                         {300, 515, 129}})
    compare(
        [N = N, m = m, k = k](World& w) {
          const Tensor x = w.input({N, k}, f32_normals(N * k, 1)), weight = w.input({m, k}, f32_normals(m * k, 2));
          const Tensor dy = w.input({N, m}, f32_normals(N * m, 3));
          const Tensor y = w.output({N, m}), added = w.input({N, m}, f32_normals(N * m, 4));
          const Tensor dx = w.output({N, k}), dw = w.input({m, k}, f32_normals(m * k, 5));
          w.be->linear(y, x, weight);
          w.be->linear(added, x, weight, true);
          w.be->linear_input_grad(dx, dy, weight);
          w.be->linear_weight_grad(dw, dy, x);
          for (const Tensor& t : {y, added, dx, dw}) w.result(t);
        },
        {}, {bound(k), bound(k), bound(m), bound(N)});
}

// cos | sin of pos * 10000^(-2i/head_dim), a row a position
Values rope_table(Index T, Index head_dim) {
  Values table;
  for (Index pos = 0; pos < T; ++pos)
    for (Index i = 0; i < head_dim; ++i) {
      const double exponent = -2.0 * static_cast<double>(i % (head_dim / 2)) / static_cast<double>(head_dim);
      const double angle = static_cast<double>(pos) * std::pow(10000.0, exponent);
      table.push_back(static_cast<float>(i < head_dim / 2 ? std::cos(angle) : std::sin(angle)));
    }
  return table;
}

struct AttentionSize {
  Index sequences, T, H, head_dim;
  Index N() const { return sequences * T; }
  Index d() const { return H * head_dim; }
};

const AttentionSize attention_sizes[] = {{1, 1, 1, 2},   {3, 1, 2, 6},    {2, 33, 3, 6},  {5, 33, 1, 32},
                                         {1, 64, 2, 64}, {2, 65, 2, 128}, {1, 130, 1, 2}, {1, 200, 3, 32}};

TEST(Cpu, QkNormRope) {
  for (const auto& s : attention_sizes)
    compare(
        [&](World& w) {
          const Tensor rstd = w.output({s.N(), 2 * s.H}),
                       rope = w.input({s.T, s.head_dim}, rope_table(s.T, s.head_dim));
          const Tensor qkv = w.input({s.N(), 3 * s.d()}, f32_normals(s.N() * 3 * s.d(), 1, 2));
          const Tensor dqkv = w.input({s.N(), 3 * s.d()}, f32_normals(s.N() * 3 * s.d(), 2));
          w.be->qk_norm_rope(qkv, rstd, rope, 1e-6);
          w.be->qk_norm_rope_backward(dqkv, qkv, rstd, rope);
          for (const Tensor& t : {qkv, rstd, dqkv}) w.result(t);
        },
        {}, {bound(2), bound(1), bound(8)});
}

TEST(Cpu, Attention) {
  for (const auto& s : attention_sizes)
    compare(
        [&](World& w) {
          const Tensor qkv = w.input({s.N(), 3 * s.d()}, f32_normals(s.N() * 3 * s.d(), 1));
          const Tensor att = w.output({s.N(), s.d()}), lse = w.output({s.N(), s.H}), dqkv = w.output(qkv.shape);
          w.be->attention(att, lse, qkv, s.T);
          w.be->attention_backward(dqkv, w.input({s.N(), s.d()}, f32_normals(s.N() * s.d(), 2)), att, lse, qkv, s.T);
          for (const Tensor& t : {att, lse, dqkv}) w.result(t);
        },
        // scores of head_dim products, whose rounding exp multiplies by their size, about 2; then sums over T
        {.tokens = s.N(), .context = s.T, .heads = s.H},
        {bound(4 * s.head_dim + s.T), bound(s.head_dim), bound(4 * s.head_dim + s.T)});
}

// A sequence in pieces: some positions at once, then one, then the rest.
TEST(Cpu, CachedAttention) {
  for (const auto& s : attention_sizes) {
    const Index T = s.T, d = s.d();
    std::vector<double> bounds(static_cast<std::size_t>(std::min<Index>(T, 3)),
                               bound(4 * s.head_dim + T));  // as attention's
    bounds.insert(bounds.end(), {0, 0});                    // keys and values are copies
    compare(
        [&](World& w) {
          const Tensor keys = w.output({T, d}), values = w.output({T, d});
          const Index first = T / 2, after = std::min(first + 1, T);
          for (const auto& [begin, end] : {std::array<Index, 2>{0, first}, {first, after}, {after, T}}) {
            if (begin == end) continue;
            const Tensor att = w.output({end - begin, d});
            const Tensor qkv =
                w.input({end - begin, 3 * d}, f32_normals((end - begin) * 3 * d, static_cast<unsigned>(begin)));
            w.be->cached_attention(att, keys, values, qkv, begin, s.head_dim);
            w.result(att);
          }
          w.result(keys);
          w.result(values);
        },
        {.context = T, .heads = s.H}, bounds);
  }
}

TEST(Cpu, AttentionSurvivesLargeScores) {
  const AttentionSize s{1, 70, 1, 8};
  compare(
      [&](World& w) {
        const Tensor qkv = w.input({s.N(), 3 * s.d()}, f32_normals(s.N() * 3 * s.d(), 1, 30));
        const Tensor att = w.output({s.N(), s.d()}), lse = w.output({s.N(), s.H});
        w.be->attention(att, lse, qkv, s.T);
        w.result(att);
        w.result(lse);
      },
      // scores have deviation 2500: a rounding of one is 2500 u = 1.5e-4 in its exponential
      {.tokens = s.N(), .context = s.T, .heads = s.H}, {2500 * u, bound(s.head_dim)});
}

TEST(Cpu, SwiGlu) {
  for (auto [N, F] : {std::array<Index, 2>{1, 1}, {7, 33}, {64, 512}})
    for (double deviation : {1.0, 40.0})  // 40: exponentials overflow and underflow
      compare(
          [&, N = N, F = F](World& w) {
            const Tensor gate_up = w.input({N, 2 * F}, f32_normals(N * 2 * F, 1, deviation));
            const Tensor y = w.output({N, F}), dgate_up = w.output({N, 2 * F});
            w.be->swiglu(y, gate_up);
            w.be->swiglu_backward(dgate_up, w.input({N, F}, f32_normals(N * F, 2)), gate_up);
            w.result(y);
            w.result(dgate_up);
          },
          {}, {bound(4), bound(8)});
}

TEST(Cpu, HeadLoss) {
  for (auto [N, V, d] :
       {std::array<Index, 3>{1, 1, 1}, {1, 17, 5}, {33, 1001, 24}, {600, 70, 33}})  // chunks are of 256
    compare(
        [&, N = N, V = V, d = d](World& w) {
          const Tensor h = w.input({N, d}, f32_normals(N * d, 1)), weight = w.input({V, d}, f32_normals(V * d, 2, 0.5));
          const Tensor targets = w.ids(random_ids(N, V, 3)), dh = w.output({N, d});
          const Tensor dw = w.input({V, d}, f32_normals(V * d, 4, 1e-3)), loss = w.doubles({3}),
                       forward = w.doubles({-1});
          w.be->head_loss(loss, dh, dw, h, weight, targets, 1.0 / static_cast<double>(N));
          w.be->head_loss(forward, h, weight, targets, 0.25);
          for (const Tensor& t : {loss, forward, dh, dw}) w.result(t);
        },
        {.tokens = N, .width = d, .vocab = V}, {bound(d), bound(d), bound(8 * d), bound(8 * d + N)});
}

TEST(Cpu, HeadLossOfLargeLogits) {
  const Index N = 9, V = 300, d = 16;
  compare(
      [&](World& w) {
        const Tensor loss = w.doubles({0});
        w.be->head_loss(loss, w.input({N, d}, f32_normals(N * d, 1, 50)), w.input({V, d}, f32_normals(V * d, 2, 50)),
                        w.ids(random_ids(N, V, 3)), 1);
        w.result(loss);
      },
      {.tokens = N, .width = d, .vocab = V}, {bound(d)});
}

TEST(Cpu, NotANumberAndInfinityPropagate) {
  const Index N = 70, V = 30, d = 24, H = 2;
  for (const float bad : {nan, infinity, -infinity}) {
    const auto spoilt = [&](Index n, unsigned seed) {
      Values values = f32_normals(n, seed);
      values[static_cast<std::size_t>(n / 3)] = static_cast<double>(bad);
      return values;
    };
    const WorkspaceSizes sizes{
        .tokens = N, .context = 35, .width = d, .heads = H, .vocab = V, .panel = N, .newton_schulz = {{1, V, N}}};
    compare_non_finite(
        [&](World& w) {
          const Tensor y = w.output({N, d}), rstd = w.output({N}), dx = w.input({N, d}, f32_normals(N * d, 1));
          w.be->rmsnorm(y, rstd, w.input({N, d}, spoilt(N * d, 2)), 1e-6);
          w.be->rmsnorm_backward(dx, w.input({N, d}, f32_normals(N * d, 3)), y, rstd);
          w.result(y);
          w.result(dx);
        },
        sizes);
    compare_non_finite(
        [&](World& w) {
          const Tensor qkv = w.input({N, 3 * d}, spoilt(N * 3 * d, 1)), rstd = w.output({N, 2 * H});
          const Tensor att = w.output({N, d}), lse = w.output({N, H}), dqkv = w.output(qkv.shape);
          w.be->qk_norm_rope(qkv, rstd, w.input({35, d / H}, rope_table(35, d / H)), 1e-6);
          w.be->attention(att, lse, qkv, 35);
          w.be->attention_backward(dqkv, w.input({N, d}, f32_normals(N * d, 2)), att, lse, qkv, 35);
          for (const Tensor& t : {att, lse, dqkv}) w.result(t);
        },
        sizes);
    compare_non_finite(
        [&](World& w) {
          const Tensor keys = w.output({35, d}), values = w.output({35, d}), att = w.output({35, d});
          w.be->cached_attention(att, keys, values, w.input({35, 3 * d}, spoilt(35 * 3 * d, 1)), 0, d / H);
          w.result(att);
        },
        sizes);
    compare_non_finite(
        [&](World& w) {
          const Tensor gate_up = w.input({N, 2 * d}, spoilt(N * 2 * d, 1)), y = w.output({N, d});
          const Tensor dgate_up = w.output({N, 2 * d});
          w.be->swiglu(y, gate_up);
          w.be->swiglu_backward(dgate_up, w.input({N, d}, f32_normals(N * d, 2)), gate_up);
          w.result(y);
          w.result(dgate_up);
        },
        sizes);
    compare_non_finite(
        [&](World& w) {
          const Tensor loss = w.doubles({0}), dh = w.output({N, d}), dw = w.input({V, d}, f32_normals(V * d, 1));
          w.be->head_loss(loss, dh, dw, w.input({N, d}, spoilt(N * d, 2)), w.input({V, d}, f32_normals(V * d, 3)),
                          w.ids(random_ids(N, V, 4)), 1);
          for (const Tensor& t : {loss, dh, dw}) w.result(t);
        },
        sizes);
    compare_non_finite(
        [&](World& w) {
          const Tensor x = w.input({V, N}, spoilt(V * N, 1)), sum = w.doubles({0}),
                       columns = w.doubles(f32_normals(N, 2));
          const Tensor low = w.output({N}), high = w.output({N}), norms = w.doubles(f32_normals(V, 3));
          w.be->squared_norm(sum, x);
          w.be->column_sum(columns, x);
          w.be->row_norms(norms, x);
          w.be->row_range(low, high, w.input({N, N}, f32_normals(N * N, 4)), x);
          w.be->newton_schulz(std::vector<Tensor>{x}, 2, 1e-5);
          for (const Tensor& t : {sum, columns, norms, low, high, x}) w.result(t);
        },
        sizes);
  }
}

TEST(Cpu, OverflowReachesTheLoss) {  // 1e25 * 1e25 is finite in f64, not in f32
  const Calls calls = [](World& w) {
    const Tensor loss = w.doubles({0});
    w.be->head_loss(loss, w.input({2, 3}, Values(6, 1e25)), w.input({4, 3}, Values(12, 1e25)), w.ids({1, 2}), 1);
    w.result(loss);
  };
  EXPECT_FALSE(std::isfinite(on_cpu(calls, {.tokens = 2, .width = 3, .vocab = 4}, 2)[0][0]));
}

// ---- the update ----

TEST(Cpu, NormAndElementwiseUpdates) {
  for (auto [V, d] : {std::array<Index, 2>{1, 1}, {3, 5}, {129, 33}, {1000, 70}})
    compare(
        [V = V, d = d](World& w) {
          const Index n = V * d;
          const Shape shape{V, d};
          const UpdateControl control = w.control(0.7);
          const Tensor grad = w.input(shape, f32_normals(n, 1, 1e-2)), lr = w.doubles({4e-3}), sum = w.doubles({0.5});
          const Tensor weight = w.input(shape, f32_normals(n, 2)), buffer = w.input(shape, f32_normals(n, 3, 1e-2));
          const Tensor out = w.output(shape), step = w.output(shape), m = w.input(shape, f32_normals(n, 4, 1e-2));
          Values squares = f32_normals(n, 5, 1e-2);
          for (double& v : squares) v = static_cast<float>(v * v);
          const Tensor v = w.input(shape, squares), rows = w.input(shape, f32_normals(n, 6));
          const Tensor sums = w.doubles(f32_normals(d, 7)), norms = w.doubles(f32_normals(V, 8));
          w.be->squared_norm(sum, grad);
          w.be->momentum(out, buffer, grad, control, {0.95, 0.05, 1.25, 0.5});
          w.be->adamw(step, m, v, grad, lr, control, {0.9, 0.999, 1e-10}, 12);
          w.be->apply_step(weight, step, lr, 0.1, control);
          w.be->column_sum(sums, rows);
          w.be->subtract_row(rows, sums, 1.0 / static_cast<double>(V + 1));
          w.be->row_normalize(rows, 1e-8);
          w.be->scale(rows, lr, -3);
          w.be->row_norms(norms, rows);
          for (const Tensor& t : {sum, buffer, out, m, v, step, weight, sums, rows, norms}) w.result(t);
        },
        // sums are in double; the others round a few times an element
        {}, {u, bound(2), bound(4), bound(2), bound(2), bound(8), bound(1), u, bound(4), bound(4)});
}

TEST(Cpu, NewtonSchulz) {
  for (auto [count, m, n] : {std::array<Index, 3>{1, 1, 1}, {5, 7, 7}, {3, 20, 65}, {8, 65, 20}, {1, 100, 300}}) {
    const Index short_side = std::min(m, n), long_side = std::max(m, n);
    compare(
        [count = count, m = m, n = n](World& w) {
          std::vector<Tensor> matrices;
          for (Index i = 0; i < count; ++i)
            matrices.push_back(w.input({m, n}, f32_normals(m * n, static_cast<unsigned>(i), 0.1)));
          w.be->newton_schulz(matrices, 5, 1e-5);
          for (const Tensor& t : matrices) w.result(t);
        },
        // a step multiplies an error by 3.4 at most, and only where singular values are still small; where they are
        // near 1 its slope is below 1
        {.newton_schulz = {{count, short_side, long_side}}}, Values(static_cast<std::size_t>(count), 16 * bound(2)));
  }
}

// ---- measurements ----

TEST(Cpu, RowRange) {
  for (auto [P, V, d] : {std::array<Index, 3>{1, 1, 1}, {3, 700, 5}, {300, 65, 33}})  // chunks are of 256
    compare(
        [P = P, V = V, d = d](World& w) {
          const Tensor low = w.output({P}), high = w.output({P});
          w.be->row_range(low, high, w.input({P, d}, f32_normals(P * d, 1)),
                          w.input({V, d}, f32_normals(V * d, 2, 1e-3)));
          w.result(low);
          w.result(high);
        },
        {.width = d, .vocab = V, .panel = P}, {bound(d), bound(d)});
}

// Clouds of rows that a screen in f32 could get wrong. On the exact ones every squared distance is exact in f64, so
// that ties are ties in whatever order the terms are summed.
struct Cloud {
  const char* name;
  bool exact;
  std::function<double(std::mt19937& engine, Index row, Index column)> element;
};

double normal(std::mt19937& engine) { return std::normal_distribution<double>()(engine); }
double sign(std::mt19937& engine) { return engine() % 2 ? 1 : -1; }

const Cloud clouds[] = {
    {"gaussian", false, [](auto& e, Index, Index) { return normal(e); }},
    {"1e30", false, [](auto& e, Index, Index) { return 1e30 * normal(e); }},
    {"1e-30", false, [](auto& e, Index, Index) { return 1e-30 * normal(e); }},
    {"largest", true, [](auto& e, Index, Index) { return sign(e) * 0x1.fffffep127; }},
    {"subnormal", true, [](auto& e, Index, Index) { return 0x1p-149 * (static_cast<double>(e() % 50) - 25); }},
    {"heavy tails", false, [](auto& e, Index, Index) { return std::exp(5 * normal(e)) * sign(e); }},
    {"tiny with an offset", false, [](auto& e, Index, Index) { return 1000 + 1e-3 * normal(e); }},
    {"offset by column", false, [](auto& e, Index, Index k) { return 1e4 * std::cos(double(k)) + 0.01 * normal(e); }},
    {"last bits of one", true, [](auto& e, Index, Index) { return 1 + 0x1p-23 * static_cast<double>(e() % 4); }},
    {"equal", true, [](auto&, Index, Index k) { return std::cos(double(k)); }},
    {"zero", true, [](auto& e, Index, Index) { return 0 * sign(e); }},
    {"equal but the last", true, [](auto&, Index i, Index k) { return i == 6 && k == 0 ? 3.0 : 1.0; }},
    {"few rows, many times", false,
     [](auto&, Index i, Index k) { return std::cos(3.0 * double(i % 4) + 1.7 * double(k)); }},
    {"cube", true, [](auto& e, Index, Index) { return sign(e); }},
    {"lattice", true, [](auto& e, Index, Index) { return static_cast<double>(e() % 3); }},
    {"axes", true, [](auto&, Index i, Index k) { return i / 2 == k ? (i % 2 ? -1.0 : 1.0) : 0.0; }},
    {"simplex", true, [](auto&, Index i, Index k) { return i == k ? 1.0 : 0.0; }},
    {"three clusters", false,
     [](auto& e, Index i, Index k) {
       return 3 * std::sin(2.0 * double(i % 3 + 1) * double(k + 1)) + 1e-6 * normal(e);
     }},
    {"one far away", false, [](auto& e, Index i, Index) { return i == 3 ? 1e6 : 1e-6 * normal(e); }},
    {"line", true, [](auto&, Index i, Index k) { return double(i * (k + 1)); }},
};

TEST(Cpu, DiameterIsThatOfTheFullSearch) {
  std::mt19937 engine(1);
  for (const Cloud& cloud : clouds)
    for (const auto [V, d] : {std::array<Index, 2>{1, 3},
                              {2, 1},
                              {2, 300},
                              {7, 2},
                              {20, 17},
                              {33, 1},
                              {50, 5},
                              {64, 33},
                              {257, 3},
                              {300, 40},
                              {700, 7}}) {
      Values values;
      for (Index i = 0; i < V; ++i)
        for (Index k = 0; k < d; ++k) values.push_back(static_cast<float>(cloud.element(engine, i, k)));
      const auto calls = [&, V = V, d = d](std::vector<Index> counts) {
        return [&, V, d, counts](World& w) {
          const Tensor s = w.input({V, d}, values);
          for (const Index shares : counts)
            for (Index share = 0; share < shares; ++share) {
              const Tensor distance = w.doubles({-1}), pair = w.ids({-1, -1});
              w.be->row_diameter(distance, pair, s, share, shares);
              w.result(distance);
              w.result(pair);
            }
        };
      };
      const WorkspaceSizes sizes{.width = d, .vocab = V, .diameter = true};
      const auto full = on_reference(calls({1}), sizes), found = on_cpu(calls({1, 2, 5}), sizes, 1);
      EXPECT_TRUE(same_bits(on_cpu(calls({1}), sizes, 3, 8), {found[0], found[1]}));
      const std::string what = fmt::format("{} ({}, {})", cloud.name, V, d);
      std::size_t at = 0;
      for (const std::size_t shares : {1u, 2u, 5u}) {
        std::size_t best = at;  // the result of the share with the largest distance, of those the smallest pair
        for (std::size_t i = at; i < at + 2 * shares; i += 2)
          if (found[i] > found[best] || (found[i] == found[best] && found[i + 1] < found[best + 1])) best = i;
        // both are sums of d squares in f64, taken in different orders
        EXPECT_NEAR(found[best][0], full[0][0], static_cast<double>(d + 2) * 0x1p-53 * full[0][0]) << what;
        const auto i = static_cast<std::size_t>(found[best + 1][0]), j = static_cast<std::size_t>(found[best + 1][1]);
        if (found[best + 1] != full[1]) {
          // distinct pairs at one distance, to that rounding
          EXPECT_FALSE(cloud.exact) << what << ": " << i << ", " << j;
          ASSERT_LT(i, j) << what;
          ASSERT_LT(j, static_cast<std::size_t>(V)) << what;
          double square = 0;
          for (std::size_t k = 0; k < static_cast<std::size_t>(d); ++k) {
            const auto width = static_cast<std::size_t>(d);
            square += std::pow(values[i * width + k] - values[j * width + k], 2);
          }
          EXPECT_NEAR(std::sqrt(square), full[0][0], static_cast<double>(d + 2) * 0x1p-53 * full[0][0]) << what;
        }
        at += 2 * shares;
      }
    }
}

TEST(Cpu, DiameterOfManyRandomClouds) {
  std::mt19937 engine(2);
  for (int cloud = 0; cloud < 400; ++cloud) {
    const Index V = 2 + engine() % 40, d = 1 + engine() % 20;
    const double offset = std::pow(10.0, engine() % 8) - 1, size = std::pow(10.0, static_cast<int>(engine() % 10) - 5);
    const double spread = engine() % 2 ? 2 : 0;
    Values values;
    for (Index i = 0; i < V; ++i) {
      const double radius = size * std::exp(spread * normal(engine));
      for (Index k = 0; k < d; ++k) values.push_back(static_cast<float>(offset + radius * normal(engine)));
    }
    const Calls calls = [&](World& w) {
      const Tensor distance = w.doubles({-1}), pair = w.ids({-1, -1});
      w.be->row_diameter(distance, pair, w.input({V, d}, values));
      w.result(distance);
      w.result(pair);
    };
    const WorkspaceSizes sizes{.width = d, .vocab = V, .diameter = true};
    const auto full = on_reference(calls, sizes), found = on_cpu(calls, sizes, cloud % 8 ? 1 : 3);
    EXPECT_NEAR(found[0][0], full[0][0], static_cast<double>(d + 2) * 0x1p-53 * full[0][0]) << "cloud " << cloud;
    EXPECT_EQ(found[1], full[1]) << "cloud " << cloud << ": " << V << " rows of " << d << ", offset " << offset;
  }
}

// Clusters at rows of a Hadamard matrix, all equally far apart: distances differ by less than the screen's rounding,
// and products of long rows round more than once.
TEST(Cpu, DiameterAmongDistancesThatF32CannotTellApart) {
  std::mt19937 engine(3);
  for (int cloud = 0; cloud < 100; ++cloud) {
    const Index V = 150, d = 256, clusters = 3 + engine() % 6;
    const double noise = std::pow(10.0, -5 - 0.1 * static_cast<double>(engine() % 20));
    Values values;
    for (Index i = 0; i < V; ++i)
      for (Index k = 0; k < d; ++k)
        values.push_back(static_cast<float>(
            (std::popcount(static_cast<std::uint64_t>((i % clusters + 1) & k)) % 2 ? -1 : 1) + noise * normal(engine)));
    const Calls calls = [&](World& w) {
      const Tensor distance = w.doubles({-1}), pair = w.ids({-1, -1});
      w.be->row_diameter(distance, pair, w.input({V, d}, values));
      w.result(distance);
      w.result(pair);
    };
    const WorkspaceSizes sizes{.width = d, .vocab = V, .diameter = true};
    const auto full = on_reference(calls, sizes), found = on_cpu(calls, sizes, 1);
    EXPECT_NEAR(found[0][0], full[0][0], static_cast<double>(d + 2) * 0x1p-53 * full[0][0]) << "cloud " << cloud;
    EXPECT_EQ(found[1], full[1]) << "cloud " << cloud << ": " << clusters << " clusters, noise " << noise;
  }
}

TEST(Cpu, DiameterWithANonFiniteElement) {
  for (const float bad : {nan, infinity, -infinity}) {
    Values values = f32_normals(300 * 5, 1);
    values[270 * 5 + 3] = values[290 * 5] = static_cast<double>(bad);
    const Calls calls = [&](World& w) {
      const Tensor distance = w.doubles({-1}), pair = w.ids({-1, -1});
      w.be->row_diameter(distance, pair, w.input({300, 5}, values));
      w.result(distance);
      w.result(pair);
    };
    const auto found = on_cpu(calls, {.width = 5, .vocab = 300, .diameter = true}, 3);
    EXPECT_TRUE(std::isnan(found[0][0]));
    EXPECT_EQ(found[1], (Values{270, 270}));
  }
}

// ---- memory ----

TEST(Cpu, RefusesMemoryThatIsNotThere) {
  const auto be = make_cpu_backend();
  for (const Index bytes : {Index{1} << 50, Index{-1}}) try {
      be->allocate(bytes);
      FAIL() << bytes;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Exit::device);
      const std::string message = error.what();
      EXPECT_EQ(message.find("[memory] cpu: needs "), 0u) << message;
      EXPECT_NE(message.find(std::to_string(bytes) + " bytes"), std::string::npos) << message;
      EXPECT_NE(message.find(" available"), std::string::npos) << message;
    }
}

TEST(Cpu, RefusesAWorkspaceThatIsTooSmall) {
  const auto be = make_cpu_backend();
  const WorkspaceSizes sizes{.tokens = 8, .context = 8, .width = 4, .heads = 1, .vocab = 20};
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(be->workspace_bytes(sizes)) - 1);
  EXPECT_THROW(be->set_workspace({bytes.data(), DType::u8, {static_cast<Index>(bytes.size())}}, sizes),
               std::logic_error);
}

TEST(Cpu, WorkspaceIsTheLargestOperation) {
  const auto be = make_cpu_backend();
  const WorkspaceSizes loss{.tokens = 4096, .width = 8, .vocab = 50257};
  EXPECT_GE(be->workspace_bytes(loss), 256 * 50257 * 4);
  EXPECT_LE(be->workspace_bytes(loss), 256 * 50257 * 4 + 256);
  WorkspaceSizes both = loss;
  both.newton_schulz = {{1, 16, 16}};
  EXPECT_EQ(be->workspace_bytes(both), be->workspace_bytes(loss));
}

TEST(Cpu, ProbesSayWhatTheyDidAndStayInTheirMemory) {
  World world(make_cpu_backend(), {});
  const Tensor memory = world.make(DType::u8, {world.be->probe_bytes()});
  std::memset(memory.data, 0, static_cast<std::size_t>(memory.bytes()));
  EXPECT_EQ(world.be->probe_products(memory), 2 * std::pow(1024.0, 3) * omp_get_max_threads());  // one each
  EXPECT_EQ(world.be->probe_stream(memory), 0x1p28 * 3 / 2);  // two halves read, one written
  world.results();                                            // looks at the guards
}

TEST(Cpu, MarksAreInOrder) {
  const auto be = make_cpu_backend();
  const Index first = be->mark(), second = be->mark();
  EXPECT_GE(be->seconds_between(first, second), 0);
  EXPECT_EQ(be->seconds_between(first, second), -be->seconds_between(second, first));
  EXPECT_EQ(be->seconds_between(0, 1'500'000'000), 1.5);  // nanoseconds
}

TEST(Cpu, DescriptionNamesThreadsAndLibrary) {
  const auto be = make_cpu_backend();
  EXPECT_NE(be->description().find(std::to_string(omp_get_max_threads()) + " thread"), std::string::npos);
  EXPECT_NE(be->description().find("OpenBLAS"), std::string::npos) << be->description();
  EXPECT_NE(be->description().find(openblas_get_corename()), std::string::npos) << be->description();
}

}  // namespace
}  // namespace rownorm
