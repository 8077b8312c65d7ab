// The reference's backward operations against central finite differences of its forward operations, at odd sizes. Every
// output that an operation writes whole starts as NaN, every one that accumulates starts at values of its own.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "golden.h"
#include "ops/bench.h"

namespace rownorm {
namespace {

// Differences with h = 1e-5 on values of order 1 in double: h^2 f''' / 6 is about 1e-10, rounding (sums of up to 1e3
// products, 1e-14) over h is about 1e-9.
constexpr double step = 1e-5, tolerance = 1e-8;

class Gradients : public ::testing::Test {
 protected:
  Bench be{"reference"};

  Tensor normal(Shape shape, unsigned seed) { return be.tensor(DType::f64, shape, normals(shape.size(), seed)); }
  Tensor unwritten(Shape shape) {
    return be.tensor(DType::f64, shape, Values(static_cast<std::size_t>(shape.size()), NAN));
  }
  double dot(Tensor a, Tensor b) {
    double sum = 0;
    for (std::int64_t i = 0; i < a.size(); ++i) sum += a.as<double>()[i] * b.as<double>()[i];
    return sum;
  }

  // d objective / d x_i for every i.
  Values numeric(Tensor x, const std::function<double()>& objective) {
    Values gradient;
    for (std::int64_t i = 0; i < x.size(); ++i) {
      double& element = x.as<double>()[i];
      const double at = element;
      element = at + step;
      const double above = objective();
      element = at - step;
      const double below = objective();
      element = at;
      gradient.push_back((above - below) / (2 * step));
    }
    return gradient;
  }

  void expect_gradient(Tensor gradient, Tensor x, const std::function<double()>& objective) {
    EXPECT_LT(golden::relative_l2(be.values(gradient), numeric(x, objective)), tolerance);
  }
  // gradient accumulated on top of `before`
  void expect_added(Tensor gradient, const Values& before, Tensor x, const std::function<double()>& objective) {
    Values added = be.values(gradient);
    for (std::size_t i = 0; i < added.size(); ++i) added[i] -= before[i];
    EXPECT_LT(golden::relative_l2(added, numeric(x, objective)), tolerance);
  }
};

TEST_F(Gradients, Embedding) {
  const std::int64_t N = 9, V = 5, d = 3;
  const Tensor w = normal({V, d}, 1), y = unwritten({N, d}), dy = normal({N, d}, 2), dw = normal({V, d}, 3);
  const Tensor tokens = be.ids({4, 0, 4, 1, 1, 4, 3, 0, 1});  // repeated, and 2 never
  const Values before = be.values(dw);
  be->embedding_backward(dw, tokens, dy);
  expect_added(dw, before, w, [&] {
    be->embedding(y, tokens, w);
    return dot(y, dy);
  });
}

TEST_F(Gradients, RmsNorm) {
  const std::int64_t N = 4, d = 7;
  // an eps as large as the mean square, so that its part in the derivative shows
  const double eps = 0.5;
  const Tensor x = normal({N, d}, 1), y = unwritten({N, d}), rstd = unwritten({N});
  const Tensor dy = normal({N, d}, 2), dx = normal({N, d}, 3);
  const Values before = be.values(dx);
  be->rmsnorm(y, rstd, x, eps);
  be->rmsnorm_backward(dx, dy, y, rstd);
  expect_added(dx, before, x, [&] {
    be->rmsnorm(y, rstd, x, eps);
    return dot(y, dy);
  });
}

TEST_F(Gradients, Linear) {
  const std::int64_t N = 5, m = 3, k = 7;
  const Tensor x = normal({N, k}, 1), w = normal({m, k}, 2), y = unwritten({N, m}), dy = normal({N, m}, 3);
  const Tensor dx = unwritten({N, k}), dw = normal({m, k}, 4);
  const Values before = be.values(dw);
  be->linear_input_grad(dx, dy, w);
  be->linear_weight_grad(dw, dy, x);
  const auto objective = [&] {
    be->linear(y, x, w);
    return dot(y, dy);
  };
  expect_gradient(dx, x, objective);
  expect_added(dw, before, w, objective);
}

TEST_F(Gradients, LinearAccumulates) {
  const std::int64_t N = 5, m = 3, k = 7;
  const Tensor x = normal({N, k}, 1), w = normal({m, k}, 2), y = unwritten({N, m}), sum = normal({N, m}, 3);
  Values expected = be.values(sum);
  be->linear(y, x, w);
  const Values product = be.values(y);
  for (std::size_t i = 0; i < expected.size(); ++i) expected[i] += product[i];
  be->linear(sum, x, w, true);
  EXPECT_EQ(be.values(sum), expected);
}

// cos | sin of pos * 10000^(-2i/head_dim)
Values rope_table(std::int64_t T, std::int64_t head_dim) {
  Values table;
  for (std::int64_t pos = 0; pos < T; ++pos)
    for (std::int64_t column = 0; column < head_dim; ++column) {
      const auto i = static_cast<double>(column % (head_dim / 2));
      const double angle = static_cast<double>(pos) * std::pow(10000, -2 * i / static_cast<double>(head_dim));
      table.push_back(column < head_dim / 2 ? std::cos(angle) : std::sin(angle));
    }
  return table;
}

TEST_F(Gradients, QkNormRope) {
  const std::int64_t T = 7, N = 3 * T, H = 3, head_dim = 6, d = H * head_dim;
  const double eps = 0.5;  // as in RmsNorm
  const Tensor x = normal({N, 3 * d}, 1), rope = be.tensor(DType::f64, {T, head_dim}, rope_table(T, head_dim));
  const Tensor qkv = unwritten({N, 3 * d}), rstd = unwritten({N, 2 * H});
  const Tensor dout = normal({N, 3 * d}, 2), dqkv = unwritten({N, 3 * d});
  const auto objective = [&] {
    be->copy(qkv, x);
    be->qk_norm_rope(qkv, rstd, rope, eps);
    return dot(qkv, dout);
  };
  objective();
  be->copy(dqkv, dout);
  be->qk_norm_rope_backward(dqkv, qkv, rstd, rope);
  expect_gradient(dqkv, x, objective);
  objective();
  for (std::int64_t n = 0; n < N; ++n)
    for (std::int64_t j = 2 * d; j < 3 * d; ++j) {  // v
      EXPECT_EQ(qkv.as<double>()[n * 3 * d + j], x.as<double>()[n * 3 * d + j]);
      EXPECT_EQ(dqkv.as<double>()[n * 3 * d + j], dout.as<double>()[n * 3 * d + j]);
    }
}

TEST_F(Gradients, Attention) {
  const std::int64_t T = 7, N = 3 * T, H = 3, head_dim = 6, d = H * head_dim;
  const Tensor qkv = normal({N, 3 * d}, 1), att = unwritten({N, d}), lse = unwritten({N, H});
  const Tensor datt = normal({N, d}, 2), dqkv = unwritten({N, 3 * d});
  const auto objective = [&] {
    be->attention(att, lse, qkv, T);
    return dot(att, datt);
  };
  objective();
  be->attention_backward(dqkv, datt, att, lse, qkv, T);
  expect_gradient(dqkv, qkv, objective);
}

TEST_F(Gradients, SwiGlu) {
  const std::int64_t N = 5, F = 7;
  const Tensor gate_up = normal({N, 2 * F}, 1), y = unwritten({N, F}), dy = normal({N, F}, 2);
  const Tensor dgate_up = unwritten({N, 2 * F});
  be->swiglu_backward(dgate_up, dy, gate_up);
  expect_gradient(dgate_up, gate_up, [&] {
    be->swiglu(y, gate_up);
    return dot(y, dy);
  });
}

TEST_F(Gradients, HeadLoss) {
  const std::int64_t N = 5, V = 11, d = 7;
  const double scale = 0.3;
  const Tensor h = normal({N, d}, 1), w = normal({V, d}, 2), targets = be.ids({10, 0, 3, 3, 7});
  const Tensor loss = be.scalar(2), dh = unwritten({N, d}), dw = normal({V, d}, 3);
  const Values before = be.values(dw);
  be->head_loss(loss, dh, dw, h, w, targets, scale);
  const auto objective = [&] {
    const Tensor sum = be.scalar(0);
    be->head_loss(sum, h, w, targets, scale);
    return be->read(sum);
  };
  EXPECT_DOUBLE_EQ(be->read(loss), 2 + objective());
  expect_gradient(dh, h, objective);
  expect_added(dw, before, w, objective);
}

}  // namespace
}  // namespace rownorm
