// The exchange between ranks over MPI, run as `mpirun -n N test_ranks` (tests/CMakeLists.txt): every rank runs every
// test, and checks what it has against what it can work out alone.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>

#include "comm/comm.h"
#include "device.h"
#include "geometry/diameter.h"
#include "geometry/hilbert.h"
#include "ops/open.h"
#include "train/numbers.h"

namespace rownorm {
namespace {

using testing::Device;
using testing::get;
using testing::put;

std::unique_ptr<Comm> comm;
constexpr double nan = std::numeric_limits<double>::quiet_NaN();
constexpr double inf = std::numeric_limits<double>::infinity();

// What rank r holds: any rank can say.
std::vector<double> values_of(int rank, std::int64_t n, unsigned seed) {
  std::mt19937_64 generator(seed * 1000 + static_cast<unsigned>(rank));
  std::normal_distribution<double> normal;
  std::vector<double> values(static_cast<std::size_t>(n));
  for (double& v : values) v = normal(generator) * std::exp2(normal(generator) * 10);
  return values;
}

template <class T>
std::vector<T> as(const std::vector<double>& values) {
  return {values.begin(), values.end()};
}

template <class T>
Tensor tensor_of(std::vector<T>& values) {
  return {values.data(), dtype_of<T>(), {static_cast<std::int64_t>(values.size())}};
}

// Sizes around the 1 MiB that are sent at a time, and none.
const std::int64_t lengths[] = {0, 1, 5, (1 << 18) - 1, (1 << 18) + 3, (3 << 18) + 1};

template <class T>
class Reductions : public ::testing::Test {};
using Types = ::testing::Types<float, double, std::int32_t>;
TYPED_TEST_SUITE(Reductions, Types);

TYPED_TEST(Reductions, AreTheSumsInRankOrderRoundedOnce) {
  using T = TypeParam;
  for (const std::int64_t n : lengths) {
    std::vector<double> sum(static_cast<std::size_t>(n)), low(sum.size(), inf), high(sum.size(), -inf);
    for (int r = 0; r < comm->size(); ++r) {
      const auto theirs = as<T>(values_of(r, n, 1));
      for (std::size_t i = 0; i < sum.size(); ++i) {
        const auto x = static_cast<double>(theirs[i]);
        sum[i] = r == 0 ? x : sum[i] + x;
        low[i] = std::min(low[i], x);
        high[i] = std::max(high[i], x);
      }
    }
    for (const auto& [how, expected] :
         {std::pair{Reduction::sum, sum}, {Reduction::min, low}, {Reduction::max, high}}) {
      auto mine = as<T>(values_of(comm->rank(), n, 1));
      comm->all_reduce(tensor_of(mine), how);
      EXPECT_EQ(mine, as<T>(expected)) << n;
    }
    for (int owner = 0; owner < comm->size(); ++owner) {
      auto mine = as<T>(values_of(comm->rank(), n, 1));
      comm->wait(comm->start_reduce(tensor_of(mine), owner));
      if (owner == comm->rank()) {
        EXPECT_EQ(mine, as<T>(sum)) << n;
      }
      mine = as<T>(values_of(comm->rank(), n, 1));
      comm->wait(comm->start_broadcast(tensor_of(mine), owner));
      EXPECT_EQ(mine, as<T>(values_of(owner, n, 1))) << n;
    }
  }
}

TEST(Exchange, Bf16IsAddedInF64AndRoundedToNearestEven) {
  const auto bits = [](float x) { return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(x) >> 16); };
  // Rank 0: 1, the others 2^-9 (half a unit in the last place of 1 is 2^-8): two of them round to even, three up.
  std::vector<std::uint16_t> x{bits(comm->rank() == 0 ? 1.0F : 0x1p-9F), bits(-0.0F), bits(1.0F)};
  comm->all_reduce({x.data(), DType::bf16, {3}}, Reduction::sum);
  const int others = comm->size() - 1;
  const double exact = 1 + others * 0x1p-9;
  const double rounded = std::nearbyint(exact * 128) / 128;  // ties to even
  EXPECT_EQ(x[0], bits(static_cast<float>(rounded)));
  EXPECT_EQ(x[1], bits(-0.0F));
  EXPECT_EQ(x[2], bits(static_cast<float>(comm->size())));
}

TEST(Exchange, NoReductionDropsANaN) {
  for (int bad = 0; bad < comm->size(); ++bad)
    for (const Reduction how : {Reduction::sum, Reduction::min, Reduction::max}) {
      std::vector<double> x{comm->rank() == bad ? nan : 1.0, 2.0};
      comm->all_reduce(tensor_of(x), how);
      EXPECT_TRUE(std::isnan(x[0]));
      EXPECT_FALSE(std::isnan(x[1]));
      std::vector<std::uint16_t> half{static_cast<std::uint16_t>(comm->rank() == bad ? 0x7f81 : 0x3f80)};
      comm->all_reduce({half.data(), DType::bf16, {1}}, how);
      EXPECT_FALSE(all_finite(half.data(), DType::bf16, 1));
    }
}

TEST(Exchange, TextsOfEveryRankInOrder) {
  // Of every length, none too, with bytes that end C strings.
  const auto text = [](int r) {
    return std::string(static_cast<std::size_t>(r) * 70'000, 'a') + std::string(r > 0, '\0');
  };
  const auto all = comm->all_gather(text(comm->rank()));
  ASSERT_EQ(all.size(), static_cast<std::size_t>(comm->size()));
  for (int r = 0; r < comm->size(); ++r) EXPECT_EQ(all[static_cast<std::size_t>(r)], text(r));
  EXPECT_EQ(from_first_rank(*comm, std::to_string(comm->rank())), "0");
}

TEST(Exchange, HostMemoryFromOneRankToAnother) {
  const std::int64_t n = 300'001;  // doubles: more than one chunk
  for (int from = 0; from < comm->size(); ++from)
    for (int to = 0; to < comm->size(); ++to) {
      if (comm->rank() != from && comm->rank() != to) continue;
      auto mine = values_of(comm->rank(), n, 2);
      comm->transfer(mine.data(), n * 8, from, to);
      EXPECT_EQ(mine, values_of(comm->rank() == to ? from : comm->rank(), n, 2));
    }
}

TEST(Together, ThrowsTheFirstFailingRanksErrorEverywhere) {
  EXPECT_NO_THROW(together(*comm, [] {}));
  const int last = comm->size() - 1;
  try {
    together(*comm, [&] {
      if (comm->rank() == last) fail(Exit::data, "[x] only the last");
    });
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Exit::data);
    EXPECT_EQ(std::string(e.what()),
              last == 0 ? "[x] only the last" : fmt::format("[x] only the last (on rank {} of {})", last, last + 1));
  }
  try {
    together(*comm, [&] {
      if (comm->rank() == 0) fail(Exit::numbers, "[x] 4 of rank 0");
      throw std::logic_error("other");
    });
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Exit::numbers);
    EXPECT_EQ(std::string(e.what()), "[x] 4 of rank 0");
  }
}

TEST(Exchange, WeightsThatDifferAreNamed) {
  const Config config = parse_config(R"({
    "model": { "vocab_size": 7, "context": 4, "layers": 1, "width": 6, "head_dim": 2 },
    "data": { "train": "-", "validation": "-" }, "batch": { "sequences": 1, "micro_batch": 1 },
    "schedule": { "updates": 9 }, "output": "-",
    "optimizer": { "hidden": { "algorithm": "muon", "lr": 0.01 }, "embedding": { "algorithm": "adamw", "lr": 0.01 },
                   "head": { "algorithm": "rownorm", "lr": 0.01 } } })",
                                     "test", {});
  const auto be = open_backend("cpu", "auto");
  Training t;
  const Device device(*be, workspace_sizes(config), [&](Arena& arena) {
    t = make_training(arena, config, be->compute_dtype(), be->master_dtype(), 0, comm->rank(), comm->size());
  });
  initialize(*be, t.master, config.model, 1);
  EXPECT_EQ(first_difference_of_ranks(*be, *comm, t), "");
  const int last = comm->size() - 1;
  if (comm->rank() == last) be->fill(t.weights.matrices[5].rows(23, 24), 1);
  EXPECT_EQ(first_difference_of_ranks(*be, *comm, t),
            fmt::format("blocks.0.gate.weight is not the same on rank 0 and rank {}", last));
}

// S and h equal on all ranks: the measurements over ranks are those of one process.
class Measured : public ::testing::TestWithParam<const char*> {
 protected:
  static constexpr std::int64_t vocab = 257, width = 24;
  const std::vector<PositionRange> ranges{{0, 7}, {40, 71}, {90, 96}};
  std::unique_ptr<Backend> be = open_backend(GetParam(), "auto");
  std::unique_ptr<Comm> alone = make_single_process();
  Tensor step, hidden;
  DiameterTensors diameter;
  Panel panel;
  Device device{*be, sizes_of(), [this](Arena& arena) {
                  step = arena.add("step", be->master_dtype(), {vocab, width});
                  hidden = arena.add("hidden", be->compute_dtype(), {96, width});
                  diameter = make_diameter(arena, vocab);
                  panel = make_panel(arena, ranges, width, be->compute_dtype(), be->master_dtype());
                }};

  static WorkspaceSizes sizes_of() {
    WorkspaceSizes sizes;
    sizes.vocab = vocab;
    sizes.width = width;
    sizes.panel = 7 + 31 + 6;
    sizes.diameter = true;
    return sizes;
  }

  void SetUp() override {
    put(*be, step, values_of(0, vocab * width, 3));
    put(*be, hidden, values_of(0, 96 * width, 4));
  }

  // Positions dealt to `ranks` in blocks of eight.
  void collect_of(int rank, int ranks) {
    be->fill(panel.hidden, 0);
    for (int first = 0; first < 96; first += 8)
      if (first / 8 % ranks == rank) collect(*be, panel, hidden.rows(first, first + 8), first);
  }
};

TEST_P(Measured, DiameterIsExactlyThatOfOneProcess) {
  const StepGeometry right = measure_step(*be, *alone, diameter, step);
  const StepGeometry ours = measure_step(*be, *comm, diameter, step);
  EXPECT_EQ(ours.diameter, right.diameter);
  EXPECT_EQ(ours.pair, right.pair);
  EXPECT_EQ(ours.row_norm_max, right.row_norm_max);
  EXPECT_EQ(ours.row_norm_median, right.row_norm_median);

  be->fill(step, 1);  // no two rows differ
  EXPECT_EQ(measure_step(*be, *comm, diameter, step).diameter, 0);
  EXPECT_EQ(measure_step(*be, *comm, diameter, step).pair, (std::array<std::int32_t, 2>{0, 0}));

  std::vector<double> few(static_cast<std::size_t>(vocab * width));  // equal distances: the first pair of them
  for (const auto& [row, value] : {std::pair{3, 1.0}, {100, 1.0}, {200, -1.0}, {250, -1.0}})
    few[static_cast<std::size_t>(row * width)] = value;
  put(*be, step, few);
  EXPECT_EQ(measure_step(*be, *comm, diameter, step).diameter, 2);
  EXPECT_EQ(measure_step(*be, *comm, diameter, step).pair, (std::array<std::int32_t, 2>{3, 200}));

  auto values = values_of(0, vocab * width, 3);
  values[static_cast<std::size_t>(200 * width)] = nan;
  put(*be, step, values);
  EXPECT_TRUE(std::isnan(measure_step(*be, *comm, diameter, step).diameter));
  EXPECT_EQ(measure_step(*be, *comm, diameter, step).pair, (std::array<std::int32_t, 2>{200, 200}));
}

TEST_P(Measured, HilbertRmsIsThatOfOneProcess) {
  collect_of(0, 1);
  const double right = hilbert_rms(*be, *alone, panel, step);
  ASSERT_GT(right, 0);
  const int rank = comm->rank(), ranks = comm->size();
  collect_of(rank, ranks);
  const Tensor mine = step.rows(vocab * rank / ranks, vocab * (rank + 1) / ranks);
  // Each (S h)_i is a sum of 24 products; blocks of rows may add it up in another order.
  const double tolerance = (be->master_dtype() == DType::f64 ? 0x1p-53 : 0x1p-24) * 24;
  EXPECT_NEAR(hilbert_rms(*be, *comm, panel, mine), right, tolerance * right);

  collect_of(rank, ranks);  // all rows on the last rank, as under Muon; none elsewhere
  const Tensor whole = rank == ranks - 1 ? step : step.rows(0, 0);
  EXPECT_NEAR(hilbert_rms(*be, *comm, panel, whole), right, tolerance * right);
}

INSTANTIATE_TEST_SUITE_P(Devices, Measured, ::testing::Values("reference", "cpu"));

}  // namespace
}  // namespace rownorm

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  rownorm::comm = rownorm::open_comm();
  if (rownorm::comm->size() != std::stoi(argv[1])) {  // not started by mpirun: nothing would be tested
    fmt::print(stderr, "{} ranks, expected {}\n", rownorm::comm->size(), argv[1]);
    return 1;
  }
  if (rownorm::comm->rank() != 0)  // one report
    delete ::testing::UnitTest::GetInstance()->listeners().Release(
        ::testing::UnitTest::GetInstance()->listeners().default_result_printer());
  const int failed = RUN_ALL_TESTS();
  const auto all = rownorm::comm->all_gather(failed == 0 ? "" : "failed");
  for (std::size_t r = 0; r < all.size(); ++r)
    if (!all[r].empty()) fmt::print(stderr, "rank {} failed\n", r);
  rownorm::comm.reset();
  return failed;
}
