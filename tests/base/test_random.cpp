#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/random.h"
#include "golden.h"

namespace rownorm {
namespace {

// ---- Philox4x32-10 ----

// Random123-1.14.0, tests/kat_vectors.
TEST(Philox, KnownAnswers) {
  using Words = std::array<std::uint32_t, 4>;
  constexpr std::uint32_t ones = 0xffffffff;
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox4x32({ones, ones, ones, ones}, {ones, ones}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

// ---- normal numbers ----

std::vector<double> normals(std::int64_t n, std::uint64_t seed, std::string_view stream, double std = 1,
                            std::int64_t first = 0) {
  std::vector<double> values(static_cast<std::size_t>(n));
  fill_normal(Tensor{values.data(), DType::f64, {n}}, seed, stream, std, first);
  return values;
}

// Expected values by this program of Python's own integers and math:
//
//   def philox(c, k):
//       for _ in range(10):
//           p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
//           c = [(p1 >> 32) ^ c[1] ^ k[0], p1 % 2**32, (p0 >> 32) ^ c[3] ^ k[1], p0 % 2**32]
//           k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
//       return c
//   def fnv1a(name):
//       h = 0xCBF29CE484222325
//       for byte in name.encode(): h = ((h ^ byte) * 0x100000001B3) % 2**64
//       return h
//   def normal(seed, name, i):
//       split = lambda x: [x % 2**32, x >> 32]
//       w = philox(split(i // 2) + split(fnv1a(name)), split(seed))
//       u, v = (((w[j] | w[j + 1] << 32) >> 11) + 1 for j in (0, 2))
//       r, a = math.sqrt(-2 * math.log(u / 2**53)), 2 * math.pi * v / 2**53
//       return r * (math.sin(a) if i % 2 else math.cos(a))
TEST(Normal, EqualsAnotherImplementation) {
  const struct {
    std::uint64_t seed;
    const char* stream;
    std::int64_t index;
    double value;
  } expected[] = {
      {0, "embed.weight", 0, -0.5056218109844117},
      {0, "embed.weight", 1, -1.7073840218270253},
      {0, "embed.weight", 25731583, -0.47013262377198534},
      {7, "lm_head.weight", 2, -1.0804616891457435},
      {(1ull << 40) + 3, "blocks.31.attn.q.weight", (1ll << 34) + 1, 0.3424570204203975},
      {~0ull, "", 1ll << 62, -0.5850612677828109},
  };
  // Rounding of log, sqrt, sin or cos and their product: a few units in the last place, of at most 8.6.
  for (const auto& e : expected)
    EXPECT_NEAR(normals(1, e.seed, e.stream, 1, e.index)[0], e.value, 4 * 8.6 * 0x1p-53) << e.stream << e.index;
}

TEST(Normal, AnyPartEqualsThatPartOfTheWhole) {
  const auto whole = normals(101, 3, "w", 0.02);
  for (std::int64_t first = 0; first <= 101; ++first)
    for (const std::int64_t n : {0, 1, 2, 3, 50, 101}) {
      if (first + n > 101) continue;
      const auto part = normals(n, 3, "w", 0.02, first);
      EXPECT_TRUE(std::equal(part.begin(), part.end(), whole.begin() + first)) << first << " " << n;
    }
}

TEST(Normal, WritesNothingBesideItsTensor) {
  for (const std::int64_t first : {0, 1}) {
    std::vector<double> values(9, 77.0);
    fill_normal(Tensor{values.data() + 1, DType::f64, {7}}, 3, "w", 0.02, first);
    EXPECT_EQ(values.front(), 77.0);
    EXPECT_EQ(values.back(), 77.0);
    EXPECT_NE(values[1], 77.0);
    EXPECT_NE(values[7], 77.0);
  }
}

TEST(Normal, SinglePrecisionIsTheRoundedDouble) {
  const auto wide = normals(10'001, 5, "w", 0.02);
  std::vector<float> narrow(wide.size());
  fill_normal(Tensor{narrow.data(), DType::f32, {73, 137}}, 5, "w", 0.02);
  for (std::size_t i = 0; i < wide.size(); ++i) ASSERT_EQ(narrow[i], static_cast<float>(wide[i])) << i;
}

TEST(Normal, OnlyFloatsAndNoNegativeStart) {
  std::vector<double> values(4);
  EXPECT_THROW(fill_normal(Tensor{values.data(), DType::i32, {4}}, 0, "w", 1), std::logic_error);
  EXPECT_THROW(fill_normal(Tensor{values.data(), DType::bf16, {4}}, 0, "w", 1), std::logic_error);
  EXPECT_THROW(fill_normal(Tensor{values.data(), DType::f64, {4}}, 0, "w", 1, -1), std::logic_error);
}

double mean_of(const std::vector<double>& x, int power) {
  double sum = 0;
  for (const double v : x) sum += std::pow(v, power);
  return sum / static_cast<double>(x.size());
}

double correlation(const double* x, const double* y, std::size_t n) {
  double sum = 0;
  for (std::size_t i = 0; i < n; ++i) sum += x[i] * y[i];
  return sum / static_cast<double>(n);
}

// Bounds: five standard deviations of each estimate over n samples of N(0, 1), unless said otherwise.
TEST(Normal, IsNormal) {
  const std::int64_t n = 1'000'000;
  const double deviation = 1 / std::sqrt(static_cast<double>(n));
  auto x = normals(n, 11, "blocks.0.up.weight");
  EXPECT_NEAR(mean_of(x, 1), 0, 5 * deviation);
  EXPECT_NEAR(mean_of(x, 2), 1, 5 * std::sqrt(2) * deviation);   // Var x^2 = 2
  EXPECT_NEAR(mean_of(x, 3), 0, 5 * std::sqrt(15) * deviation);  // Var x^3 = 15
  EXPECT_NEAR(mean_of(x, 4), 3, 5 * std::sqrt(96) * deviation);  // Var x^4 = 105 - 9
  for (const std::size_t lag : {1u, 2u, 3u, 512u})               // neighbours, of a pair and of two blocks, and rows
    EXPECT_NEAR(correlation(x.data(), x.data() + lag, x.size() - lag), 0, 5.01 * deviation) << lag;

  const auto beyond = std::count_if(x.begin(), x.end(), [](double v) { return std::abs(v) > 4; });
  const double expected = static_cast<double>(n) * std::erfc(4 / std::sqrt(2));
  EXPECT_NEAR(static_cast<double>(beyond), expected, 5 * std::sqrt(expected));

  // Kolmogorov-Smirnov: P(sup |F_n - F| > 2.5 / sqrt(n)) = 2 exp(-2 * 2.5^2) = 7e-6.
  std::sort(x.begin(), x.end());
  double distance = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double cdf = 0.5 * std::erfc(-x[i] / std::sqrt(2));
    distance = std::max({distance, static_cast<double>(i + 1) / static_cast<double>(n) - cdf,
                         cdf - static_cast<double>(i) / static_cast<double>(n)});
  }
  EXPECT_LT(distance, 2.5 * deviation);
}

TEST(Normal, ScalesWithStd) {
  const auto unit = normals(1001, 1, "w", 1), small = normals(1001, 1, "w", 0.25), none = normals(1001, 1, "w", 0);
  for (std::size_t i = 0; i < unit.size(); ++i) {
    EXPECT_EQ(small[i], 0.25 * unit[i]);
    EXPECT_EQ(none[i], 0);
  }
}

TEST(Normal, NamesAndSeedsAreStreamsOfTheirOwn) {
  const std::int64_t n = 100'000;
  const std::vector<std::vector<double>> streams{
      normals(n, 0, "blocks.0.attn.q.weight"),
      normals(n, 0, "blocks.0.attn.k.weight"),
      normals(n, 0, "blocks.1.attn.q.weight"),
      normals(n, 0, "blocks.10.attn.q.weight"),
      normals(n, 1, "blocks.0.attn.q.weight"),
      normals(n, 1ull << 32, "blocks.0.attn.q.weight"),
      normals(n, 0, ""),
  };
  const double deviation = 1 / std::sqrt(static_cast<double>(n));
  for (std::size_t a = 0; a < streams.size(); ++a)
    for (std::size_t b = 0; b < a; ++b)
      EXPECT_NEAR(correlation(streams[a].data(), streams[b].data(), streams[a].size()), 0, 5 * deviation)
          << a << " " << b;
}

// ---- NumPy's generator ----

uint128 hexadecimal(const std::string& text) {
  uint128 value = 0;
  for (const char c : text.substr(2)) value = value * 16 + static_cast<uint128>(c <= '9' ? c - '0' : c - 'a' + 10);
  return value;
}

std::vector<std::uint32_t> head(const std::vector<std::uint32_t>& v, std::size_t n) {
  return {v.begin(), v.begin() + static_cast<std::ptrdiff_t>(n)};
}

std::vector<std::uint32_t> tail(const std::vector<std::uint32_t>& v, std::size_t n) {
  return {v.end() - static_cast<std::ptrdiff_t>(n), v.end()};
}

TEST(NumPy, GeneratorsOfTheGoldenData) {
  using U32 = std::vector<std::uint32_t>;
  using U64 = std::vector<std::uint64_t>;
  const auto golden = golden::json("data_order.json");
  ASSERT_EQ(golden["generators"].size(), 7u);
  for (const auto& g : golden["generators"]) {
    const auto entropy = g["entropy"].get<U64>();
    SCOPED_TRACE(g["entropy"].dump());
    const SeedSequence seed(entropy);
    EXPECT_EQ(seed.generate_u32(8), g["generate_state_u32_8"].get<U32>());
    EXPECT_EQ(seed.generate_u64(4), g["generate_state_u64_4"].get<U64>());
    Pcg64 generator(seed);
    EXPECT_EQ(generator.state(), hexadecimal(g["pcg64_state_hex"]));
    EXPECT_EQ(generator.increment(), hexadecimal(g["pcg64_inc_hex"]));
    for (const auto& expected : g["first_8_u64"]) EXPECT_EQ(generator.next64(), expected.get<std::uint64_t>());

    ASSERT_EQ(g["shuffles_of_arange"].size(), 9u);
    for (const auto& shuffle : g["shuffles_of_arange"]) {
      const auto n = shuffle["n"].get<std::uint32_t>();
      auto order = shuffled_range(entropy, n);
      ASSERT_EQ(order.size(), n);
      if (shuffle.contains("full")) {
        EXPECT_EQ(order, shuffle["full"].get<U32>()) << n;
      }
      const auto first = shuffle["first"].get<U32>(), last = shuffle["last"].get<U32>();
      EXPECT_EQ(head(order, first.size()), first) << n;
      EXPECT_EQ(tail(order, last.size()), last) << n;
      std::sort(order.begin(), order.end());
      for (std::uint32_t i = 0; i < n; ++i) ASSERT_EQ(order[i], i);
    }
  }
}

// numpy 2.4.6: SeedSequence(entropy).generate_state(3) and default_rng(...).shuffle(arange(7))
TEST(NumPy, EntropyOfAnyLength) {
  using U32 = std::vector<std::uint32_t>;
  using U64 = std::vector<std::uint64_t>;
  const struct {
    U64 entropy;
    U32 state, order;
  } expected[] = {
      {{}, {2968811710, 3677149159, 745650761}, {2, 4, 3, 6, 5, 0, 1}},
      {{1, 2, 3, 4, 5, 6, 7}, {1473699950, 2347498550, 2851142778}, {4, 6, 1, 0, 5, 3, 2}},
      {{~0ull, 1ull << 33, 0, 5}, {3027780162, 1162074226, 1862953562}, {1, 0, 3, 5, 6, 4, 2}},
  };
  for (const auto& e : expected) {
    EXPECT_EQ(SeedSequence(e.entropy).generate_u32(3), e.state);
    EXPECT_EQ(shuffled_range(e.entropy, 7), e.order);
  }
}

TEST(NumPy, OneLargeShuffleWhole) {
  const auto golden = golden::json("data_order.json")["one_full_large_shuffle"];
  const auto entropy = golden["entropy"].get<std::vector<std::uint64_t>>();
  EXPECT_EQ(shuffled_range(entropy, golden["n"].get<std::uint32_t>()),
            golden["values"].get<std::vector<std::uint32_t>>());
}

TEST(NumPy, HalvesComeLowFirst) {
  const std::vector<std::uint64_t> entropy{42};
  Pcg64 whole{SeedSequence(entropy)}, halves{SeedSequence(entropy)};
  for (int i = 0; i < 5; ++i) {
    const std::uint64_t value = whole.next64();
    EXPECT_EQ(halves.next32(), static_cast<std::uint32_t>(value));
    EXPECT_EQ(halves.next32(), static_cast<std::uint32_t>(value >> 32));
  }
}

TEST(NumPy, NothingToShuffle) {
  const std::vector<std::uint64_t> entropy{1, 2};
  EXPECT_TRUE(shuffled_range(entropy, 0).empty());
  EXPECT_EQ(shuffled_range(entropy, 1), std::vector<std::uint32_t>{0});
}

}  // namespace
}  // namespace rownorm
