// Every operation of the CUDA backend against the reference, at odd and tiny sizes and at sizes whose rows can be read
// 16 bytes at a time. The same calls are made on both, on the same values: those that the backend's compute dtype holds
// exactly, f32 for fp32 and tf32 (whose operands are then rounded), bf16 for bf16.
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "device.h"
#include "golden.h"
#include "ops/bench.h"

namespace rownorm {
namespace {

using Index = std::int64_t;
using Results = std::vector<Values>;
using Calls = std::function<std::vector<Tensor>(Bench&)>;

// Half a unit of the last place: of f32, of f32 cut to tf32's 11 bits, of bf16.
constexpr double u32 = 0x1p-24, u_tf32 = 0x1p-11, u16 = 0x1p-8;

// What f32 or, cut, bf16 holds exactly.
Values exact_normals(Index n, unsigned seed, double deviation, DType dtype) {
  Values values = normals(n, seed, deviation);
  for (double& v : values) {
    const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(v));
    v = static_cast<double>(std::bit_cast<float>(dtype == DType::bf16 ? bits & 0xffff0000U : bits));
  }
  return values;
}

// How far a result may be from the reference's, relative L2. Each rounding adds at most half a unit of the last place,
// independent ones as the square root of their number; x2 for the spread of small samples.
struct Bound {
  double sums;      // roundings to f32 on the way: the terms that one thread adds, and what it computes of each
  double stored;    // roundings to the compute dtype of this result and of stored results it is made from
  double products;  // of operands that tf32 rounds, 0 or 1: each once, whatever the length
};

class Kernels : public EveryBackend {
 protected:
  bool bf16() const { return GetParam() == "cuda_bf16"; }
  bool tf32() const { return GetParam() == "cuda_tf32"; }

  static Results run(const std::string& backend, const WorkspaceSizes& sizes, const Calls& calls) {
    Bench bench(backend, sizes, 0xff);
    Results results;
    for (const Tensor& t : calls(bench)) {
      if (t.dtype == DType::i32) {
        const auto integers = bench.integers(t);
        results.emplace_back(integers.begin(), integers.end());
      } else {
        results.push_back(bench.values(t));
      }
    }
    return results;
  }

  void compare(const std::string& what, const WorkspaceSizes& sizes, const Calls& calls,
               const std::vector<Bound>& bounds) const {
    const Results expected = run("reference", sizes, calls), actual = run(GetParam(), sizes, calls);
    ASSERT_EQ(actual.size(), bounds.size());
    for (std::size_t i = 0; i < bounds.size(); ++i) {
      const Bound& b = bounds[i];
      const double at_most = 2 * (u32 * std::sqrt(b.sums) + (bf16() ? u16 : u32) * std::sqrt(b.stored) +
                                  (tf32() ? u_tf32 * std::sqrt(2 * b.products) : 0));
      EXPECT_LE(golden::relative_l2(actual[i], expected[i]), at_most) << what << ": result " << i;
    }
    EXPECT_EQ(run(GetParam(), sizes, calls), actual) << what << ": another run differs";
  }

  // An output starts as NaN, so that an element that is not written shows.
  static Tensor output(Bench& be, DType dtype, Shape shape) {
    return be.tensor(dtype, shape, Values(static_cast<std::size_t>(shape.size()), NAN));
  }
  Tensor compute(Bench& be, Shape shape, unsigned seed, double deviation = 1) const {
    const DType dtype = bf16() ? DType::bf16 : DType::f32;  // of the backend under test; the reference gets the same
    return be.tensor(be.compute(), shape, exact_normals(shape.size(), seed, deviation, dtype));
  }
  static Tensor master(Bench& be, Shape shape, unsigned seed, double deviation = 1) {
    return be.tensor(be.master(), shape, exact_normals(shape.size(), seed, deviation, DType::f32));
  }
};

class Products : public Kernels {};  // what a precision that only products know is for

std::string sizes_text(std::initializer_list<Index> sizes) {
  std::string text;
  for (const Index size : sizes) text += (text.empty() ? "" : " x ") + std::to_string(size);
  return text;
}

TEST_P(Kernels, Copies) {
  for (const Index n : {1, 7, 8, 4096})
    compare(
        sizes_text({n}), {},
        [&](Bench& be) {
          std::vector<Tensor> results;
          for (const DType from : {DType::f64, DType::f32, DType::bf16})
            for (const DType to : {DType::f64, DType::f32, DType::bf16}) {
              const Tensor source = be.tensor(from, {n}, normals(n, 1));
              results.push_back(output(be, to, {n}));
              be->copy(results.back(), source);
            }
          return results;
        },
        std::vector<Bound>(9, {0, 0, 0}));
}

TEST_P(Kernels, LongTransfersPassThroughTheStagingWhole) {
  const Index n = (Index{9} << 20) / 8 + 3;  // more than all pieces of it
  const Values values = normals(n, 1);
  Bench be(GetParam(), {});
  const Tensor t = be.zeros(DType::f64, {n});
  be->upload(t, values.data());
  be->upload(t.rows(0, 1), values.data() + 1);
  Values back(values.size());
  be->download(back.data(), t);
  EXPECT_EQ(back[0], values[1]);
  back[0] = values[0];
  EXPECT_TRUE(back == values);
}

TEST_P(Kernels, Embedding) {
  for (const auto& [N, V, d] : {std::array<Index, 3>{1, 3, 1}, {65, 7, 33}, {600, 40, 64}, {300, 1100, 8}})
    compare(sizes_text({N, V, d}), {},
            [&, N = N, V = V, d = d](Bench& be) {
              const Tensor tokens = be.ids(random_ids(N, V, 1)), y = output(be, be.compute(), {N, d});
              const Tensor dw = master(be, {V, d}, 2);
              be->embedding(y, tokens, compute(be, {V, d}, 3));
              be->embedding_backward(dw, tokens, compute(be, {N, d}, 4));
              return std::vector<Tensor>{y, dw};
            },
            {{0, 0, 0}, {1 + static_cast<double>(N) / static_cast<double>(V), 0, 0}});
}

TEST_P(Kernels, RmsNorm) {
  for (const auto& [N, d] : {std::array<Index, 2>{1, 1}, {5, 3}, {33, 130}, {9, 1024}})
    compare(sizes_text({N, d}), {},
            [&, N = N, d = d](Bench& be) {
              const Tensor y = output(be, be.compute(), {N, d}), rstd = output(be, be.master(), {N});
              const Tensor dx = compute(be, {N, d}, 1);
              be->rmsnorm(y, rstd, compute(be, {N, d}, 2, 3), 1e-6);
              be->rmsnorm_backward(dx, compute(be, {N, d}, 3), y, rstd);
              return std::vector<Tensor>{y, rstd, dx};
            },
            // a lane adds d / 32 squares, five more sums join the lanes
            {{8 + static_cast<double>(d) / 32, 1, 0},
             {8 + static_cast<double>(d) / 32, 0, 0},
             {12 + static_cast<double>(d) / 16, 2, 0}});
}

TEST_P(Products, Linear) {
  for (const auto& [N, m, k] : {std::array<Index, 3>{2, 3, 1}, {1, 5, 300}, {33, 65, 31}, {64, 128, 96}})
    compare(sizes_text({N, m, k}), {},
            [&, N = N, m = m, k = k](Bench& be) {
              const Tensor x = compute(be, {N, k}, 1), w = compute(be, {m, k}, 2), dy = compute(be, {N, m}, 3);
              const Tensor y = output(be, be.compute(), {N, m}), added = compute(be, {N, m}, 4);
              const Tensor dx = output(be, be.compute(), {N, k}), dw = master(be, {m, k}, 5);
              be->linear(y, x, w);
              be->linear(added, x, w, true);
              be->linear_input_grad(dx, dy, w);
              be->linear_weight_grad(dw, dy, x);
              return std::vector<Tensor>{y, added, dx, dw};
            },
            {{static_cast<double>(k), 1, 1},
             {static_cast<double>(k), 1, 1},
             {static_cast<double>(m), 1, 1},
             {static_cast<double>(N), 0, 1}});
}

// x times 1, x between two numbers of tf32: one of the two, whether the hardware rounds or cuts; in fp32 it is x. bf16
// has rounded it before.
TEST_P(Products, OperandsAreOfTheirPrecision) {
  const Index size = 64;
  const double x = 1 + 0x1.8p-11;
  Values xs(size * size), ones(size * size);
  for (std::size_t i = 0; i < xs.size(); i += size) {
    xs[i] = x;
    ones[i] = 1;
  }
  Bench be(GetParam(), {});
  const Tensor y = output(be, be.compute(), {size, size});
  be->linear(y, be.tensor(be.compute(), {size, size}, xs), be.tensor(be.compute(), {size, size}, ones));
  for (const double value : be.values(y)) {
    if (tf32()) {
      EXPECT_TRUE(value == 1 || value == 1 + 0x1p-10) << value;
    } else {
      EXPECT_EQ(value, bf16() ? 1 : x);
    }
  }
}

struct AttentionSize {
  Index sequences, T, H, head_dim;
  Index N() const { return sequences * T; }
  Index d() const { return H * head_dim; }
  std::string text() const { return sizes_text({sequences, T, H, head_dim}); }
};
const AttentionSize attention_sizes[] = {{1, 1, 1, 2},   {3, 1, 2, 6},    {2, 33, 3, 6},   {2, 31, 1, 32},
                                         {1, 64, 2, 64}, {1, 37, 2, 128}, {1, 130, 1, 16}, {1, 17, 1, 100}};

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

TEST_P(Kernels, QkNormRope) {
  for (const auto& s : attention_sizes)
    compare(s.text(), {},
            [&](Bench& be) {
              const Tensor rstd = output(be, be.master(), {s.N(), 2 * s.H});
              const Tensor rope = be.tensor(be.master(), {s.T, s.head_dim}, rope_table(s.T, s.head_dim));
              const Tensor qkv = compute(be, {s.N(), 3 * s.d()}, 1, 2), dqkv = compute(be, {s.N(), 3 * s.d()}, 2);
              be->qk_norm_rope(qkv, rstd, rope, 1e-6);
              be->qk_norm_rope_backward(dqkv, qkv, rstd, rope);
              return std::vector<Tensor>{qkv, rstd, dqkv};
            },
            {{16, 1, 0}, {12, 0, 0}, {32, 2, 0}});
}

// A sequence in pieces: some positions at once, then one, then the rest.
TEST_P(Kernels, CachedAttention) {
  for (const auto& s : attention_sizes) {
    const Index T = s.T, d = s.d();
    const double length = 4 * static_cast<double>(s.head_dim) + static_cast<double>(T);
    std::vector<Bound> bounds(static_cast<std::size_t>(std::min<Index>(T, 3)), {length, 1, 0});
    bounds.insert(bounds.end(), {{0, 0, 0}, {0, 0, 0}});  // keys and values are copies
    compare(
        s.text(), {},
        [&](Bench& be) {
          const Tensor keys = output(be, be.compute(), {T, d}), values = output(be, be.compute(), {T, d});
          std::vector<Tensor> results;
          const Index first = T / 2, after = std::min(first + 1, T);
          for (const auto& [begin, end] : {std::array<Index, 2>{0, first}, {first, after}, {after, T}}) {
            if (begin == end) continue;
            const Tensor att = output(be, be.compute(), {end - begin, d});
            be->cached_attention(att, keys, values, compute(be, {end - begin, 3 * d}, static_cast<unsigned>(end)),
                                 begin, s.head_dim);
            results.push_back(att);
          }
          results.insert(results.end(), {keys, values});
          return results;
        },
        bounds);
  }
}

TEST_P(Kernels, HeadsThatAreTooWideAreRefused) {
  Bench be(GetParam(), {});
  try {
    be->workspace_bytes({.width = 256, .heads = 1});
    FAIL() << "a head_dim of 256 was accepted";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "[model] head_dim 256: on device cuda at most 128");
  }
}

TEST_P(Kernels, Swiglu) {
  for (const auto& [N, F] : {std::array<Index, 2>{1, 1}, {3, 5}, {7, 130}, {5, 2056}})
    compare(sizes_text({N, F}), {},
            [&, N = N, F = F](Bench& be) {
              const Tensor y = output(be, be.compute(), {N, F}), gate_up = compute(be, {N, 2 * F}, 1, 4);
              const Tensor dgate_up = output(be, be.compute(), {N, 2 * F});
              be->swiglu(y, gate_up);
              be->swiglu_backward(dgate_up, compute(be, {N, F}, 2), gate_up);
              return std::vector<Tensor>{y, dgate_up};
            },
            {{8, 1, 0}, {16, 1, 0}});
}

TEST_P(Products, HeadLoss) {
  for (const auto& [N, V, d] : {std::array<Index, 3>{1, 1, 1}, {5, 7, 3}, {33, 515, 8}, {1030, 65, 16}})
    for (const bool backward : {true, false}) {
      if (N > 1000 && !backward) continue;
      compare(sizes_text({N, V, d}), {.tokens = N, .width = d, .vocab = V},
              [&, N = N, V = V, d = d](Bench& be) {
                const Tensor h = compute(be, {N, d}, 1), w = compute(be, {V, d}, 2), loss = be.scalar(0.5);
                const Tensor targets = be.ids(random_ids(N, V, 3));
                const Tensor dh = backward ? output(be, be.compute(), {N, d}) : compute(be, {N, d}, 4);
                const Tensor dw = master(be, {V, d}, 5, 0.1);
                if (backward)
                  be->head_loss(loss, dh, dw, h, w, targets, 1 / static_cast<double>(N));
                else
                  be->head_loss(loss, h, w, targets, 1 / static_cast<double>(N));
                return std::vector<Tensor>{loss, dh, dw};
              },
              // logits of d products, then exp and a sum; r is stored, then summed over V or N
              {{static_cast<double>(d), 0, 1},
               {static_cast<double>(4 * d + V), 2, 2},
               {static_cast<double>(4 * d + N), 1, 2}});
    }
}

// Logits of -256 and less: beside them the zeros that pad their rows would be the largest, with exp(0 - z) infinite.
TEST_P(Products, HeadLossWhereEveryLogitIsFarBelowZero) {
  const Index N = 3, V = 7, d = 2;
  compare("", {.tokens = N, .width = d, .vocab = V},
          [&](Bench& be) {
            Values rows;
            for (Index i = 0; i < V; ++i) rows.insert(rows.end(), {-8 - static_cast<double>(i) / 8, -8});
            const Tensor h = be.tensor(be.compute(), {N, d}, Values(6, 16)), w = be.tensor(be.compute(), {V, d}, rows);
            const Tensor loss = be.scalar(0), dh = output(be, be.compute(), {N, d}), dw = master(be, {V, d}, 1, 0.1);
            be->head_loss(loss, dh, dw, h, w, be.ids({0, 3, 6}), 1);
            return std::vector<Tensor>{loss, dh, dw};
          },
          // as HeadLoss's, but the terms of dh cancel: their norm is 27 times that of the sums
          {{static_cast<double>(d), 0, 1},
           {27 * 27 * static_cast<double>(4 * d + V), 27 * 27 * 2, 27 * 27 * 2},
           {static_cast<double>(4 * d + N), 1, 2}});
}

TEST_P(Kernels, RowRange) {
  for (const auto& [P, V, d] : {std::array<Index, 3>{1, 1, 1}, {5, 7, 3}, {1030, 515, 8}})
    compare(sizes_text({P, V, d}), {.width = d, .vocab = V, .panel = P},
            [&, P = P, V = V, d = d](Bench& be) {
              const Tensor lowest = output(be, be.master(), {P}), highest = output(be, be.master(), {P});
              be->row_range(lowest, highest, compute(be, {P, d}, 1), master(be, {V, d}, 2));
              return std::vector<Tensor>{lowest, highest};
            },
            {{static_cast<double>(d), 0, 0}, {static_cast<double>(d), 0, 0}});  // in f32 whatever the precision
}

TEST_P(Kernels, Update) {
  for (const auto& [V, d] : {std::array<Index, 2>{1, 1}, {7, 3}, {130, 33}, {300, 64}})
    compare(sizes_text({V, d}), {.width = d, .vocab = V},
            [&, V = V, d = d](Bench& be) {
              UpdateControl control = be.control();
              be->fill(control.clip, 0.375);
              const Tensor grad = master(be, {V, d}, 1), lr = be.scalar(0.02), sum = be.scalar(1);
              const Tensor out = output(be, be.master(), {V, d}), buffer = master(be, {V, d}, 2);
              const Tensor step = output(be, be.master(), {V, d}), exp_avg = master(be, {V, d}, 3);
              const Tensor exp_avg_sq = output(be, be.master(), {V, d}), w = master(be, {V, d}, 4);
              const Tensor columns = output(be, DType::f64, {d}), norms = output(be, DType::f64, {V});
              be->fill(exp_avg_sq, 0.75);
              be->squared_norm(sum, grad);
              be->momentum(out, buffer, grad, control, {0.95, 1, 0.95, 1});
              be->adamw(step, exp_avg, exp_avg_sq, grad, lr, control, {0.9, 0.999, 1e-10}, 3);
              be->apply_step(w, step, lr, 0.1, control);
              const Tensor normalized = master(be, {V, d}, 5), scaled = master(be, {V, d}, 6);
              const Tensor centred = master(be, {V, d}, 7);
              be->row_normalize(normalized, 1e-8);
              be->scale(scaled, lr, -3);
              be->column_sum(columns, centred);
              be->subtract_row(centred, columns, 0.5);
              be->row_norms(norms, normalized);
              return std::vector<Tensor>{sum, out,        buffer, exp_avg, exp_avg_sq, step,
                                         w,   normalized, scaled, columns, centred,    norms};
            },
            // f64 inside: one rounding of what is stored, or a few of elementwise arithmetic in f32
            {{1e-8, 0, 0},
             {8, 0, 0},
             {4, 0, 0},
             {4, 0, 0},
             {4, 0, 0},
             {12, 0, 0},
             {4, 0, 0},
             {1, 0, 0},
             {1, 0, 0},
             {1e-8, 0, 0},
             {1, 0, 0},
             {1, 0, 0}});
}

TEST_P(Kernels, NewtonSchulz) {
  for (const auto& [count, m, n] : {std::array<Index, 3>{1, 1, 1}, {3, 5, 9}, {2, 9, 5}, {2, 64, 32}})
    compare(
        sizes_text({count, m, n}), {.newton_schulz = {{count, std::min(m, n), std::max(m, n)}}},
        [&, count = count, m = m, n = n](Bench& be) {
          std::vector<Tensor> matrices;
          for (Index i = 0; i < count; ++i) matrices.push_back(master(be, {m, n}, static_cast<unsigned>(i)));
          be->newton_schulz(matrices, 5, 1e-5);
          return matrices;
        },
        // three products a step, each of at most max(m, n) terms; where a singular value is small, one step
        // makes what the steps before it rounded up to 3.4445 times as large
        std::vector<Bound>(static_cast<std::size_t>(count),
                           {std::pow(3.4445, 2) * 15 * static_cast<double>(std::max(m, n)), 0, 0}));
}

// The first `columns` columns of a product of Householder reflections: orthonormal to the rounding of f64.
Values orthonormal(Index rows, Index columns, unsigned seed) {
  Values q(static_cast<std::size_t>(rows * columns));
  for (Index i = 0; i < columns; ++i) q[static_cast<std::size_t>(i * columns + i)] = 1;
  for (unsigned reflection = 0; reflection < 4; ++reflection) {
    const Values v = normals(rows, seed + reflection);
    double square = 0;
    for (const double x : v) square += x * x;
    for (Index j = 0; j < columns; ++j) {
      double dot = 0;
      for (Index i = 0; i < rows; ++i)
        dot += v[static_cast<std::size_t>(i)] * q[static_cast<std::size_t>(i * columns + j)];
      for (Index i = 0; i < rows; ++i)
        q[static_cast<std::size_t>(i * columns + j)] -= 2 * dot / square * v[static_cast<std::size_t>(i)];
    }
  }
  return q;
}

// U diag(s) V^T becomes U diag(f(f(... s / ||s||))) V^T, f(s) = a s + b s^3 + c s^5, whatever multiplies. f is between
// its minimum 0.682 (at 1.050) and its maximum 1.203 (at 0.555) once s has passed 0.21, which s > 0.0015 does in four
// steps.
TEST_P(Kernels, NewtonSchulzMovesSingularValuesAsThePolynomialDoes) {
  // Where s is near 1, what is rounded weighs this much in a step: A, |b| + 2c = 8.9, in A A, c = 2.1, and the last
  // product, |b + c| = 2.8. tf32 rounds both operands of the three products, bf16 A, the polynomial and x when they are
  // stored. A rounding is u / sqrt(6) relative in the root mean square (uniform in +-u, over significands from 1 to 2);
  // f' is about 1 there, so that what five steps leave adds up as independent errors do; x2 for the spread. In fp32:
  // sums of at most max(m, n) terms, each of the same weights.
  const double tf32 = 2 * std::sqrt(5.0 / 6) * u_tf32 * std::sqrt(2 * (8.9 * 8.9 + 2.1 * 2.1 + 2.8 * 2.8));
  const double bf16 = 2 * std::sqrt(5.0 / 6) * u16 * std::sqrt(8.9 * 8.9 + 2.8 * 2.8 + 1);
  for (const auto& [m, n] : {std::array<Index, 2>{48, 48}, {31, 70}, {70, 31}}) {
    const Index r = std::min(m, n);
    const double fp32 = 2 * std::sqrt(5 * static_cast<double>(std::max(m, n))) * u32 * 9.6;
    const Values u = orthonormal(m, r, 1), v = orthonormal(n, r, 11);
    Values s, moved;
    double square = 0;
    for (Index i = 0; i < r; ++i) {
      s.push_back(std::pow(0.05, static_cast<double>(i) / static_cast<double>(r - 1)));  // 1 to 0.05
      square += s.back() * s.back();
    }
    for (double x : s) {
      x /= std::sqrt(square) + 1e-5;
      ASSERT_GT(x, 0.0015);
      for (int step = 0; step < 5; ++step)
        x = newton_schulz_a * x + newton_schulz_b * x * x * x + newton_schulz_c * std::pow(x, 5);
      moved.push_back(x);
      ASSERT_TRUE(x > 0.68 && x < 1.21) << x;
    }
    const auto matrix = [&, m = m, n = n](const Values& values) {
      Values product;
      for (Index i = 0; i < m; ++i)
        for (Index j = 0; j < n; ++j) {
          double sum = 0;
          for (Index k = 0; k < r; ++k)
            sum += u[static_cast<std::size_t>(i * r + k)] * values[static_cast<std::size_t>(k)] *
                   v[static_cast<std::size_t>(j * r + k)];
          product.push_back(sum);
        }
      return product;
    };
    const Values expected = matrix(moved);
    double last = 0;
    for (const auto& [precision, bound] : {std::pair{NewtonSchulzPrecision::fp32, fp32},
                                           {NewtonSchulzPrecision::tf32, tf32},
                                           {NewtonSchulzPrecision::bf16, bf16}}) {
      Bench be(GetParam(), {.newton_schulz = {{2, r, std::max(m, n), precision}}});
      const std::array matrices{be.tensor(be.master(), {m, n}, matrix(s)), be.zeros(be.master(), {m, n})};
      be->newton_schulz(matrices, 5, 1e-5, precision);
      const Values result = be.values(matrices[0]);
      const double error = golden::relative_l2(result, expected);
      EXPECT_LE(error, bound) << name_of(precision) << " " << sizes_text({m, n});
      // A u of bf16 is 8 of tf32; the weights above leave 5.6, and hardware that cuts to tf32 instead of rounding 2.8.
      EXPECT_GT(error, 2 * last) << name_of(precision) << ": no less precise than the one before";
      last = error;
      for (Index k = 0; k < r; ++k) {  // u_k^T X v_k
        double value = 0;
        for (Index i = 0; i < m; ++i)
          for (Index j = 0; j < n; ++j)
            value += u[static_cast<std::size_t>(i * r + k)] * result[static_cast<std::size_t>(i * n + j)] *
                     v[static_cast<std::size_t>(j * r + k)];
        EXPECT_TRUE(value > 0.68 - bound && value < 1.21 + bound) << name_of(precision) << ": " << value;
      }
      EXPECT_EQ(be.values(matrices[1]), Values(static_cast<std::size_t>(m * n), 0)) << name_of(precision);
    }
  }
}

TEST_P(Kernels, Diameter) {
  for (const auto& [V, d] : {std::array<Index, 2>{2, 1}, {37, 5}, {300, 33}, {1400, 8}})
    for (const double offset : {0.0, 64.0})
      compare(sizes_text({V, d}), {.width = d, .vocab = V, .diameter = true},
              [&, V = V, d = d](Bench& be) {
                Values values = exact_normals(V * d, 1, 1, DType::f32);
                for (double& v : values) v = static_cast<float>(v + offset);
                const Tensor distance = be.scalar(NAN), pair = be.ids({-1, -1});
                be->row_diameter(distance, pair, be.tensor(be.master(), {V, d}, values));
                return std::vector<Tensor>{distance, pair};
              },
              {{1e-8, 0, 0}, {0, 0, 0}});
}

// Clusters at rows of a Hadamard matrix, all equally far apart: distances differ by less than what the screen's numbers
// can hold.
TEST_P(Kernels, DiameterAmongDistancesThatTheScreenCannotTellApart) {
  std::mt19937 engine(3);
  std::normal_distribution<double> normal;
  for (int cloud = 0; cloud < 12; ++cloud) {
    const Index V = 150, d = 64, clusters = 6 + cloud;
    const double noise = std::pow(10.0, -3 - 0.1 * cloud);
    Values values;
    for (Index i = 0; i < V; ++i)
      for (Index k = 0; k < d; ++k)
        values.push_back(static_cast<float>(
            (std::popcount(static_cast<std::uint64_t>((i % clusters + 1) & k)) % 2 ? -1 : 1) + noise * normal(engine)));
    compare(fmt::format("noise {}", noise), {.width = d, .vocab = V, .diameter = true},
            [&](Bench& be) {
              const Tensor distance = be.scalar(NAN), pair = be.ids({-1, -1});
              be->row_diameter(distance, pair, be.tensor(be.master(), {V, d}, values));
              return std::vector<Tensor>{distance, pair};
            },
            {{1e-8, 0, 0}, {0, 0, 0}});
  }
}

TEST_P(Kernels, MarksAreInTheOrderOfTheQueue) {
  Bench be(GetParam(), {});
  const auto from = be->mark();
  be->fill(be.zeros(DType::f32, {1000}), 3);
  const auto to = be->mark();
  EXPECT_GE(be->seconds_between(from, to), 0);
}

// On a piece of memory that the CPU can multiply: of 32 KiB the products take 32 or 64 rows.
TEST_P(Products, ProbesSayWhatTheyDidAndStayInTheirHalves) {
  Bench be(GetParam(), {});
  const Index bytes = 32768, half = bytes / 2, element = size_of(be.compute()), side = bf16() ? 64 : 32;
  const Tensor scratch = be.zeros(DType::u8, {bytes});
  be->prepare_probes(scratch);
  const auto part = [&](Index offset, Index rows) {
    return Tensor{static_cast<char*>(scratch.data) + offset, be.compute(), {rows, side}};
  };
  const Values a = be.values(part(0, side)), b = be.values(part(side * side * element, side));
  double mean = 0, square = 0;
  for (const Values& values : {a, b})
    for (const double x : values) {
      mean += x / static_cast<double>(2 * side * side);
      square += x * x / static_cast<double>(2 * side * side);
    }
  EXPECT_NEAR(mean, 0, 4 * std::sqrt(1.0 / 3 / static_cast<double>(2 * side * side)));  // uniform in (-1, 1)
  EXPECT_NEAR(square, 1.0 / 3, 4 * std::sqrt(4.0 / 45 / static_cast<double>(2 * side * side)));

  EXPECT_EQ(be->probe_products(scratch), 2 * std::pow(static_cast<double>(side), 3));
  EXPECT_EQ(be.values(part(0, side)), a);
  Values product(a.size());
  for (Index i = 0; i < side; ++i)
    for (Index j = 0; j < side; ++j)
      for (Index k = 0; k < side; ++k)
        product[static_cast<std::size_t>(i * side + j)] +=
            a[static_cast<std::size_t>(i * side + k)] * b[static_cast<std::size_t>(j * side + k)];
  EXPECT_LE(golden::relative_l2(be.values(part(half, side)), product),
            2 * (u32 * std::sqrt(side) + (bf16()   ? u16
                                          : tf32() ? u_tf32 * std::sqrt(2)
                                                   : 0)));

  EXPECT_EQ(be->probe_stream(scratch), static_cast<double>(bytes));
  EXPECT_EQ(be.values(part(half, 2 * side)), be.values(part(0, 2 * side)));
  EXPECT_EQ(be.values(part(0, side)), a);
  EXPECT_EQ(be->probe_bytes() % 4096, 0);
  EXPECT_GE(be->probe_bytes(), Index{1} << 26);  // of the least device there is, 4 GiB
  EXPECT_LE(be->probe_bytes(), Index{1} << 30);  // of the stand-in's 80 GiB, as of all from 64 GiB on
}

const auto backend_name = [](const auto& backend) { return backend.param; };
INSTANTIATE_TEST_SUITE_P(Backends, Kernels, ::testing::Values("cuda_fp32", "cuda_bf16"), backend_name);
INSTANTIATE_TEST_SUITE_P(Backends, Products, ::testing::Values("cuda_fp32", "cuda_tf32", "cuda_bf16"), backend_name);

}  // namespace
}  // namespace rownorm
