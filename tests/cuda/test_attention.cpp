// Attention of the CUDA backend against the reference, element by element, at sizes below, at and above those of the
// kernels' tiles (64 or 128 columns; 32, 64 or 128 rows; groups of 32 heads), with and without rows of whole 16 bytes.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <string>
#include <vector>

#include "ops/bench.h"

namespace rownorm {
namespace {

using Index = std::int64_t;

struct Size {
  Index sequences, T, H, head_dim;
  double deviation = 1;  // of q: what multiplies the scores
  Index N() const { return sequences * T; }
  Index d() const { return H * head_dim; }
};

void PrintTo(const Size& s, std::ostream* out) {
  *out << s.sequences << " x " << s.T << " x " << s.H << " x " << s.head_dim << ", deviation " << s.deviation;
}

// All values are what bf16 holds exactly.
struct Inputs {
  Values qkv, datt;
};

Inputs inputs(const Size& s) {
  Inputs in{normals(s.N() * 3 * s.d(), 1), normals(s.N() * s.d(), 2)};
  for (std::size_t i = 0; i < in.qkv.size(); ++i)
    if (static_cast<Index>(i) % (3 * s.d()) < s.d()) in.qkv[i] *= s.deviation;
  for (Values* values : {&in.qkv, &in.datt})
    for (double& v : *values) {
      const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(v)) & 0xffff0000U;
      v = static_cast<double>(std::bit_cast<float>(bits));
    }
  return in;
}

struct Outputs {
  Values att, lse, dqkv;
  bool operator==(const Outputs&) const = default;
};

// Outputs start as NaN, so that an element that is not written shows. Backward is given `forward` as what forward made,
// or, without it, what it did make.
Outputs run(const std::string& backend, const Size& s, const Inputs& in, const Outputs* forward = nullptr) {
  Bench be(backend, {.tokens = s.N(), .context = s.T, .width = s.d(), .heads = s.H}, 0xff);
  const auto unwritten = [](Index n) { return Values(static_cast<std::size_t>(n), NAN); };
  const Shape wide{s.N(), 3 * s.d()}, narrow{s.N(), s.d()}, heads{s.N(), s.H};
  const Tensor qkv = be.tensor(be.compute(), wide, in.qkv), datt = be.tensor(be.compute(), narrow, in.datt);
  const Tensor att = be.tensor(be.compute(), narrow, unwritten(narrow.size()));
  const Tensor lse = be.tensor(be.master(), heads, unwritten(heads.size()));
  const Tensor dqkv = be.tensor(be.compute(), wide, unwritten(wide.size()));
  be->attention(att, lse, qkv, s.T);
  Outputs out{be.values(att), be.values(lse), {}};
  const Tensor att_in = forward == nullptr ? att : be.tensor(be.compute(), narrow, forward->att);
  const Tensor lse_in = forward == nullptr ? lse : be.tensor(be.master(), heads, forward->lse);
  be->attention_backward(dqkv, datt, att_in, lse_in, qkv, s.T);
  out.dqkv = be.values(dqkv);
  return out;
}

// How far results may be from the reference's. `u` is half a unit of the last place of what is stored and multiplied
// (p and ds are rounded to it), u32 of f32, in which scores and sums are made; errors of a sum's terms add as the root
// of their squares. Four times that: a rounding's deviation is at most u / sqrt(3), so these are 7 deviations. Below
// 2^-126 exponentials may be zero.
Outputs tolerances(const Size& s, const Inputs& in, const Outputs& forward, const Outputs& expected, double u) {
  constexpr double u32 = 0x1p-24, tiny = 0x1p-126;
  const Index T = s.T, H = s.H, hd = s.head_dim, d = s.d();
  const double scale = 1 / std::sqrt(static_cast<double>(hd)), terms = std::sqrt(static_cast<double>(hd));
  const double rows = u32 * std::sqrt(static_cast<double>(T));
  const auto at = [](const Values& values, Index i) { return values[static_cast<std::size_t>(i)]; };
  const auto dot = [&](const Values& a, Index i, const Values& b, Index j) {
    double sum = 0;
    for (Index c = 0; c < hd; ++c) sum += at(a, i + c) * at(b, j + c);
    return sum;
  };
  const auto length = [&](const Values& a, Index i) { return std::sqrt(dot(a, i, a, i)); };

  // of each result: the sum of the squares of its terms' errors, and the sum of its terms
  Values att2(forward.att.size()), att1(att2), lse2(forward.lse.size()), dqkv2(in.qkv.size()), dqkv1(dqkv2);
  const auto add = [](Values& squares, Values& sums, Index i, double error, double term) {
    squares[static_cast<std::size_t>(i)] += error * error;
    sums[static_cast<std::size_t>(i)] += std::abs(term);
  };
  for (Index n = 0; n < s.N(); ++n)
    for (Index h = 0; h < H; ++h)
      for (Index m = n - n % T; m <= n; ++m) {
        const Index q = n * 3 * d + h * hd, k = m * 3 * d + d + h * hd, v = k + d, o = n * d + h * hd;
        const double lse = at(expected.lse, n * H + h), p = std::exp(scale * dot(in.qkv, q, in.qkv, k) - lse);
        const double score = (terms + 4) * scale * length(in.qkv, q) * length(in.qkv, k);
        const double p_error = p * (u + u32 * (score + 4 * (1 + std::abs(lse)))) + tiny;
        const double dp = dot(in.datt, o, in.qkv, v), delta = dot(in.datt, o, forward.att, o), ds = p * (dp - delta);
        const double dp_error = u32 * terms * length(in.datt, o) * (length(in.qkv, v) + length(forward.att, o));
        const double ds_error = p_error * std::abs(dp - delta) + p * dp_error + u * std::abs(ds);
        lse2[static_cast<std::size_t>(n * H + h)] += std::pow(p * u32 * score, 2);
        for (Index c = 0; c < hd; ++c) {
          add(att2, att1, o + c, p_error * (std::abs(at(in.qkv, v + c)) + std::abs(at(expected.att, o + c))),
              p * at(in.qkv, v + c));
          add(dqkv2, dqkv1, v + c, p_error * at(in.datt, o + c), p * at(in.datt, o + c));
          add(dqkv2, dqkv1, q + c, scale * ds_error * at(in.qkv, k + c), scale * ds * at(in.qkv, k + c));
          add(dqkv2, dqkv1, k + c, scale * ds_error * at(in.qkv, q + c), scale * ds * at(in.qkv, q + c));
        }
      }
  Outputs most = expected;
  const auto finish = [&](Values& values, const Values& squares, const Values& sums) {
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = 4 * (std::sqrt(squares[i]) + rows * sums[i] + u * std::abs(values[i]) + tiny);
  };
  finish(most.att, att2, att1);
  finish(most.dqkv, dqkv2, dqkv1);
  for (std::size_t i = 0; i < lse2.size(); ++i)
    most.lse[i] = 4 * (std::sqrt(lse2[i]) + rows + 2 * u32 * std::abs(most.lse[i]));
  return most;
}

void expect_near(const char* name, const Values& actual, const Values& expected, const Values& most) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i)
    ASSERT_LE(std::abs(actual[i] - expected[i]), most[i])  // a NaN is not less
        << name << " " << i << ": " << actual[i] << ", expected " << expected[i];
}

class Attention : public ::testing::TestWithParam<std::tuple<std::string, Size>> {};

TEST_P(Attention, IsTheReferences) {
  const auto& [backend, s] = GetParam();
  const Inputs in = inputs(s);
  const Outputs actual = run(backend, s, in), expected = run("reference", s, in, &actual);
  const Outputs most = tolerances(s, in, actual, expected, backend == "cuda_bf16" ? 0x1p-8 : 0x1p-24);
  expect_near("att", actual.att, expected.att, most.att);
  expect_near("lse", actual.lse, expected.lse, most.lse);
  expect_near("dqkv", actual.dqkv, expected.dqkv, most.dqkv);
  EXPECT_TRUE(run(backend, s, in) == actual) << "another run differs";
}

const Size sizes[] = {
    {1, 1, 1, 2},
    {3, 1, 2, 128},
    {2, 7, 3, 6},
    {1, 16, 2, 8},
    {2, 33, 2, 24},
    {1, 64, 1, 32},
    {2, 65, 2, 64},
    {1, 130, 1, 6},
    {1, 200, 1, 64},
    {1, 33, 1, 66},
    {2, 7, 1, 96},
    {1, 65, 1, 128},
    {1, 130, 1, 2},
    {1, 200, 1, 8},
    {1, 130, 1, 96},
    {1, 16, 1, 128},
    {1, 64, 2, 66},
    {3, 65, 11, 66},
    {2, 3, 1, 5},  // an odd head_dim, which RoPE does not
                   // allow but attention does
    {1, 200, 1, 64, 32},
    {1, 70, 1, 128, 64},
    {2, 33, 1, 2, 64},  // scores of hundreds: one key has nearly all the
                        // weight
};

const auto case_name = [](const auto& test) {
  const Size& s = std::get<1>(test.param);
  return fmt::format("{}_{}_{}_{}_{}{}", std::get<0>(test.param), s.sequences, s.T, s.H, s.head_dim,
                     s.deviation > 1 ? "_large" : "");
};
INSTANTIATE_TEST_SUITE_P(Backends, Attention,
                         ::testing::Combine(::testing::Values("cuda_fp32", "cuda_bf16"), ::testing::ValuesIn(sizes)),
                         case_name);

// What is not finite in the reference's results is not finite here, and other heads and sequences do not notice. (Rows
// of the same head may: a masked product is 0 times what is masked.)
class AttentionNaN : public EveryBackend {};

TEST_P(AttentionNaN, Propagates) {
  const Size s{2, 70, 2, 8};
  const Inputs clean = inputs(s);
  const Outputs before = run(GetParam(), s, clean);
  const Index row = 40, head = 1, at = row * 3 * s.d() + head * s.head_dim;
  for (const double bad : {static_cast<double>(NAN), static_cast<double>(INFINITY)})
    for (const int part : {0, 1, 2, 3}) {  // q, k, v, datt
      SCOPED_TRACE(std::to_string(bad) + " in " + std::to_string(part));
      Inputs in = clean;
      if (part < 3)
        in.qkv[static_cast<std::size_t>(at + part * s.d())] = bad;
      else
        in.datt[static_cast<std::size_t>(row * s.d() + head * s.head_dim)] = bad;
      const Outputs actual = run(GetParam(), s, in), expected = run("reference", s, in);
      const auto check = [&](const char* name, const Values& now, const Values& reference, const Values& untouched,
                             Index width) {
        for (std::size_t i = 0; i < now.size(); ++i) {
          const Index n = static_cast<Index>(i) / width, h = static_cast<Index>(i) % width / (width / s.H);
          ASSERT_TRUE(std::isfinite(reference[i]) || !std::isfinite(now[i])) << name << " " << i << ": " << now[i];
          ASSERT_TRUE((n < s.T && h == head) || now[i] == untouched[i]) << name << " " << i << ": " << now[i];
        }
      };
      check("att", actual.att, expected.att, before.att, s.d());
      check("lse", actual.lse, expected.lse, before.lse, s.H);
      for (const Index begin : {Index{0}, s.d(), 2 * s.d()}) {
        const auto columns = [&](const Values& values) {
          Values out;
          for (Index n = 0; n < s.N(); ++n)
            out.insert(out.end(), values.begin() + n * 3 * s.d() + begin,
                       values.begin() + n * 3 * s.d() + begin + s.d());
          return out;
        };
        check("dqkv", columns(actual.dqkv), columns(expected.dqkv), columns(before.dqkv), s.d());
      }
    }
}

INSTANTIATE_TEST_SUITE_P(Backends, AttentionNaN, ::testing::Values("cuda_fp32", "cuda_bf16"),
                         [](const auto& backend) { return backend.param; });

}  // namespace
}  // namespace rownorm
