// The exchange between ranks with a GPU each, run as `mpirun -n N test_cuda_ranks N`: every rank runs every test, and
// checks what it has against what it can work out alone. With real GPUs as through the stand-in.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "base/random.h"
#include "comm/comm.h"
#include "device.h"
#include "ops/open.h"

namespace rownorm {
namespace {

using testing::Device;
using testing::get;
using testing::put;

std::unique_ptr<Comm> ranks, comm;
std::unique_ptr<Backend> be;
constexpr double nan = std::numeric_limits<double>::quiet_NaN();
constexpr double inf = std::numeric_limits<double>::infinity();
constexpr std::int64_t lengths[] = {0, 1, 5, 4099};

// Whole numbers, whose sums are exact in any order: what rank r holds any rank can say.
std::vector<double> values_of(int r, std::int64_t n) {
  std::vector<double> values(static_cast<std::size_t>(n));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<double>((i * 31 + 17) % 257) * (r - 1) + r;
  return values;
}

std::vector<double> sum_of(std::int64_t n) {
  std::vector<double> sum(static_cast<std::size_t>(n));
  for (int r = 0; r < comm->size(); ++r)
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += values_of(r, n)[i];
  return sum;
}

struct Tensors {
  std::vector<Tensor> all;
  Device memory;  // made last: it binds them
  Tensor operator[](std::size_t i) const { return all[i]; }

  Tensors(DType dtype, const std::vector<std::int64_t>& sizes)
      : memory(*be, {}, [&](Arena& arena) {
          all.clear();
          for (const std::int64_t n : sizes) all.push_back(arena.add("test", dtype, {n}));
        }) {}
};

class Exchange : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(Types, Exchange, ::testing::Values(DType::f32, DType::f64, DType::i32),
                         [](const auto& test) { return std::string(name_of(test.param)); });

TEST_P(Exchange, SumsAndBroadcasts) {
  for (const std::int64_t n : lengths) {
    const Tensors t(GetParam(), {n});
    const auto mine = values_of(comm->rank(), n);
    put(*be, t[0], mine);
    comm->all_reduce(t[0], Reduction::sum);
    EXPECT_EQ(get(*be, t[0]), sum_of(n)) << n;
    for (int owner = 0; owner < comm->size(); ++owner) {
      put(*be, t[0], mine);
      comm->wait(comm->start_reduce(t[0], owner, "x"));
      const auto reduced = get(*be, t[0]);
      if (comm->rank() == owner) {
        EXPECT_EQ(reduced, sum_of(n)) << n;
      }
      put(*be, t[0], mine);
      comm->wait(comm->start_broadcast(t[0], owner, "x"));
      EXPECT_EQ(get(*be, t[0]), values_of(owner, n)) << n;
    }
  }
}

// Any rank's NaN, infinities, zeros of both signs, the ends of the range.
TEST_P(Exchange, MinimaAndMaximaDropNoNaN) {
  const bool real = GetParam() != DType::i32;
  const double most = GetParam() == DType::f64 ? std::numeric_limits<double>::max()
                      : real                   ? 0x1.fffffep127
                                               : 0x7fffffff;
  const double tiny = GetParam() == DType::f64 ? 0x1p-1074 : real ? 0x1p-149 : 1;
  for (int bad = 0; bad < comm->size(); ++bad) {
    const bool is_bad = comm->rank() == bad;
    std::vector<double> x{is_bad ? 7.0 : 3.0, is_bad ? -7.0 : -3.0, is_bad ? most : -most, is_bad ? tiny : -tiny};
    std::vector<double> low{3, -7, -most, -tiny}, high{7, -3, most, tiny};
    if (real) {
      x.insert(x.end(),
               {is_bad ? nan : 1, is_bad ? -nan : -inf, is_bad ? nan : inf, is_bad ? inf : 2, is_bad ? -inf : 2});
      low.insert(low.end(), {nan, nan, nan, 2, -inf});
      high.insert(high.end(), {nan, nan, nan, inf, 2});
    }
    const Tensors t(GetParam(), {static_cast<std::int64_t>(x.size())});
    for (const auto& [how, expected] : {std::pair{Reduction::min, low}, {Reduction::max, high}}) {
      put(*be, t[0], x);
      comm->all_reduce(t[0], how);
      const auto found = get(*be, t[0]);
      for (std::size_t i = 0; i < x.size(); ++i)
        EXPECT_TRUE(found[i] == expected[i] || (std::isnan(found[i]) && std::isnan(expected[i])))
            << i << ": " << found[i] << ", expected " << expected[i];
    }
  }
}

TEST(Ranks, SumsOfF32AreWithinTheirRounding) {
  const std::int64_t n = 1001;
  const Tensors t(DType::f32, {n});
  std::vector<double> sum(static_cast<std::size_t>(n)), magnitude(sum.size());
  std::vector<float> mine(sum.size());
  for (int r = 0; r < comm->size(); ++r) {
    std::vector<float> values(sum.size());
    fill_normal({values.data(), DType::f32, {n}}, 5, std::to_string(r), 1, 0);
    if (r == comm->rank()) mine = values;
    for (std::size_t i = 0; i < sum.size(); ++i) {
      sum[i] += static_cast<double>(values[i]);
      magnitude[i] += std::abs(static_cast<double>(values[i]));
    }
  }
  be->upload(t[0], mine.data());
  comm->all_reduce(t[0], Reduction::sum);
  const auto found = get(*be, t[0]);
  // size - 1 additions in any order, each within half an ulp of at most the sum of magnitudes.
  for (std::size_t i = 0; i < sum.size(); ++i)
    EXPECT_NEAR(found[i], sum[i], (comm->size() - 1) * 0x1p-24 * magnitude[i]) << i;
}

// bf16: sums of whole numbers up to 256 are exact; broadcasts are of bits.
TEST(Ranks, Bf16) {
  const std::int64_t n = 301;
  const Tensors narrow(DType::bf16, {n}), wide(DType::f32, {n});
  const auto small = [&](int r) {
    std::vector<double> values(static_cast<std::size_t>(n));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<double>(i % 40) - 10 * r;
    return values;
  };
  const auto set = [&] {
    put(*be, wide[0], small(comm->rank()));
    be->copy(narrow[0], wide[0]);
  };
  const auto found = [&] {
    be->copy(wide[0], narrow[0]);
    return get(*be, wide[0]);
  };
  auto sum = small(0);
  for (int r = 1; r < comm->size(); ++r)
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += small(r)[i];
  set();
  comm->all_reduce(narrow[0], Reduction::sum);
  EXPECT_EQ(found(), sum);
  set();
  comm->wait(comm->start_broadcast(narrow[0], comm->size() - 1, "x"));
  EXPECT_EQ(found(), small(comm->size() - 1));
  EXPECT_THROW(comm->all_reduce(narrow[0], Reduction::max), std::logic_error);
}

// The exchange sees what was enqueued before it, and what is enqueued after the wait sees it; meanwhile others work.
TEST(Ranks, TicketsOrderTheExchangeAgainstTheWork) {
  const std::int64_t n = 777;
  const Tensors t(DType::f32, {n, n, n, n});
  const double mine = comm->rank() + 1, all = comm->size() * (comm->size() + 1) / 2.0;
  for (int round = 0; round < 20; ++round) {  // of tickets that are never waited for one by one
    be->fill(t[0], mine);
    be->fill(t[1], 10 * mine);
    const auto first = comm->start_reduce(t[0], 0, "x");
    const auto second = comm->start_broadcast(t[1], round % comm->size(), "y");
    be->fill(t[2], 1);  // not held up, nor does it wait
    const auto third = comm->start_broadcast(t[2], 0, "z");
    if (round % 2 == 0) comm->wait(third);
    comm->wait(second);
    be->copy(t[3], t[1]);
    comm->wait(first);
    be->fill(t[1], -1);
    if (comm->rank() == 0) {
      EXPECT_EQ(get(*be, t[0]), std::vector<double>(n, all));
    }
    EXPECT_EQ(get(*be, t[3]), std::vector<double>(n, 10.0 * (round % comm->size() + 1)));
    EXPECT_EQ(get(*be, t[1]), std::vector<double>(n, -1.0));
    comm->wait(third);
    EXPECT_EQ(get(*be, t[2]), std::vector<double>(n, 1.0));
  }
}

TEST(Ranks, TheHostsExchangeComesAfterTheDevices) {
  const Tensors t(DType::f32, {9});
  be->fill(t[0], comm->rank());
  const auto ticket = comm->start_broadcast(t[0], 0, "x");
  const auto texts = comm->all_gather(std::to_string(comm->rank()));
  for (int r = 0; r < comm->size(); ++r) EXPECT_EQ(texts[static_cast<std::size_t>(r)], std::to_string(r));
  comm->wait(ticket);
  EXPECT_EQ(get(*be, t[0]), std::vector<double>(9, 0.0));
  double x = comm->rank();
  const int last = comm->size() - 1;
  if (comm->rank() == 0 || comm->rank() == last) comm->transfer(&x, sizeof x, last, 0);
  EXPECT_EQ(x, comm->rank() == 0 ? last : comm->rank());
}

}  // namespace
}  // namespace rownorm

int main(int argc, char** argv) {
  using namespace rownorm;  // NOLINT: the program's
  ::testing::InitGoogleTest(&argc, argv);
  ranks = open_comm();
  if (argc < 2 || ranks->size() != std::stoi(argv[1])) {  // not started by mpirun: nothing would be tested
    fmt::print(stderr, "usage: mpirun -n N {} N\n", argv[0]);
    return 2;
  }
  be = open_backend("cuda", "fp32", ranks->local_rank(), ranks->local_size());
  comm = make_nccl(*ranks, *be, 60, [](const std::string& line) { fmt::print(stderr, "{}\n", line); });
  if (ranks->rank() != 0)  // one report
    delete ::testing::UnitTest::GetInstance()->listeners().Release(
        ::testing::UnitTest::GetInstance()->listeners().default_result_printer());
  const int failed = RUN_ALL_TESTS();
  const auto all = comm->all_gather(failed == 0 ? "" : "failed");
  for (std::size_t r = 0; r < all.size(); ++r)
    if (!all[r].empty()) fmt::print(stderr, "rank {} failed\n", r);
  comm.reset();
  be.reset();
  ranks.reset();
  return failed;
}
