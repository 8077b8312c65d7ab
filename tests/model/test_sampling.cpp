// The rules of sampling on distributions worked out by hand.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "model/sampling.h"

namespace rownorm {
namespace {

// Probabilities 0.1, 0.4, 0.2, 0.3 of tokens 0 to 3, up to a common factor.
const std::vector<double> logits{std::log(1.0), std::log(4.0), std::log(2.0), std::log(3.0)};

// Which token comes at the middle of each tenth of [0, 1).
std::vector<int> tenths(const Sampling& sampling, const std::vector<double>& of = logits) {
  std::vector<int> tokens;
  for (int i = 0; i < 10; ++i) tokens.push_back(sample_token(of, sampling, (i + 0.5) / 10));
  return tokens;
}

TEST(Sampling, FollowsTheProbabilities) {
  EXPECT_EQ(tenths({}), (std::vector{0, 1, 1, 1, 1, 2, 2, 3, 3, 3}));
  EXPECT_EQ(sample_token(logits, {}, 0), 0);
  EXPECT_EQ(sample_token(logits, {}, 1 - 0x1p-53), 3);
  std::vector<double> shifted;
  for (const double z : logits) shifted.push_back(z + 1e3);
  EXPECT_EQ(tenths({}, shifted), tenths({}));
}

TEST(Sampling, Temperature) {
  // Half: squared, 1 16 4 9 of 30. Very low: the largest. Very high: all alike.
  EXPECT_EQ(tenths({.temperature = 0.5}), (std::vector{1, 1, 1, 1, 1, 1, 2, 3, 3, 3}));
  EXPECT_EQ(tenths({.temperature = 1e-300}), std::vector(10, 1));
  EXPECT_EQ(tenths({.temperature = 1e300}), (std::vector{0, 0, 1, 1, 1, 2, 2, 3, 3, 3}));
  EXPECT_EQ(tenths({.temperature = 0}), std::vector(10, 1));
  EXPECT_EQ(sample_token(std::vector{1.0, 5.0, 5.0}, {.temperature = 0}, 0.9), 1);  // of equal ones the first
}

TEST(Sampling, TopK) {
  EXPECT_EQ(tenths({.top_k = 1}), std::vector(10, 1));
  EXPECT_EQ(tenths({.top_k = 2}), (std::vector{1, 1, 1, 1, 1, 1, 3, 3, 3, 3}));  // 4 of 7: 0.571
  EXPECT_EQ(tenths({.top_k = 4}), tenths({}));
  EXPECT_EQ(tenths({.top_k = 1000}), tenths({}));
  EXPECT_EQ(tenths({.top_k = 2}, {1, 1, 1, 1}), (std::vector{0, 0, 0, 0, 0, 1, 1, 1, 1, 1}));  // ties by token
}

TEST(Sampling, TopP) {
  EXPECT_EQ(tenths({.top_p = 1e-9}), std::vector(10, 1));
  EXPECT_EQ(tenths({.top_p = 0.39}), std::vector(10, 1));
  EXPECT_EQ(tenths({.top_p = 0.41}), tenths({.top_k = 2}));
  EXPECT_EQ(tenths({.top_p = 0.69}), tenths({.top_k = 2}));
  EXPECT_EQ(tenths({.top_p = 0.71}), tenths({.top_k = 3}));
  EXPECT_EQ(tenths({.top_p = 0.95}), tenths({}));
  // After top-k 3 the probabilities are 4/9, 2/9, 3/9: the two largest have 7/9 = 0.78.
  EXPECT_EQ(tenths({.top_k = 3, .top_p = 0.77}), tenths({.top_k = 2}));
  EXPECT_EQ(tenths({.top_k = 3, .top_p = 0.79}), tenths({.top_k = 3}));
}

// Leaving out what is certainly not needed changes nothing: against the definition, all tokens sorted.
// Equal logits rank by token, and what reaches p exactly is enough.
TEST(Sampling, TopPOfEqualTokens) {
  const std::vector<double> two(2, 0.0), ten(10, -3.0);
  EXPECT_EQ(tenths({.top_p = 0.5}, two), std::vector(10, 0));
  EXPECT_EQ(tenths({.top_p = 0.51}, two), (std::vector{0, 0, 0, 0, 0, 1, 1, 1, 1, 1}));
  EXPECT_EQ(tenths({.top_p = 0.25}, ten), (std::vector{0, 0, 0, 1, 1, 1, 1, 2, 2, 2}));
  EXPECT_EQ(tenths({.top_k = 2}, ten), (std::vector{0, 0, 0, 0, 0, 1, 1, 1, 1, 1}));
}

TEST(Sampling, TopPOfManyTokens) {
  std::mt19937 random(1);
  std::normal_distribution<double> normal(0, 3);
  std::uniform_real_distribution<double> uniform(0, 1);
  for (int trial = 0; trial < 10; ++trial) {
    std::vector<double> z(1000);
    for (double& v : z) v = normal(random);
    const double p = uniform(random);
    std::vector<std::size_t> order(z.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return z[a] > z[b]; });
    double total = 0, reached = 0;
    for (const double v : z) total += std::exp(v);
    std::vector<bool> kept(z.size());
    for (std::size_t n = 0; reached < p * total; ++n) {
      kept[order[n]] = true;
      reached += std::exp(z[order[n]]);
    }
    std::vector<bool> seen(z.size());
    for (int i = 0; i < 2000; ++i)
      seen[static_cast<std::size_t>(sample_token(z, {.top_p = p}, uniform(random)))] = true;
    for (std::size_t i = 0; i < z.size(); ++i) {
      EXPECT_TRUE(kept[i] || !seen[i]) << "p " << p << ", token " << i;
      // One of probability q is missed with (1 - q)^2000, e^-20 = 2e-9 at 1e-2.
      EXPECT_TRUE(seen[i] || !kept[i] || std::exp(z[i]) / reached < 1e-2) << "p " << p << ", token " << i;
    }
  }
}

}  // namespace
}  // namespace rownorm
