#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/temporary_folder.h"
#include "comm/comm.h"
#include "data/files.h"
#include "device.h"
#include "ops/open.h"
#include "train/numbers.h"
#include "train/step.h"

namespace rownorm {
namespace {

using testing::Device;
using testing::get;
using testing::put;

const char* const config_text = R"({
  "model": { "vocab_size": 7, "context": 4, "layers": 1, "width": 6, "head_dim": 2, "init_std": 0.3 },
  "data": { "train": "-", "validation": "-" },
  "batch": { "sequences": 2, "micro_batch": 1 },
  "schedule": { "updates": 9 },
  "optimizer": { "hidden": { "algorithm": "muon", "lr": 0.01 }, "embedding": { "algorithm": "adamw", "lr": 0.01 },
                 "head": { "algorithm": "rownorm", "lr": 0.01 } },
  "output": "-"
})";

// One training run in memory, on a shard of two sequences that hold every token.
class Step : public ::testing::TestWithParam<const char*> {
 protected:
  TemporaryFolder folder;
  Config config = parse_config(config_text, "test", {});
  std::unique_ptr<Backend> be = testing::open(GetParam());
  std::unique_ptr<Comm> comm = make_single_process();
  ShardSet shards{"train", write_bytes(folder / "t.bin", shard_bytes({0, 1, 2, 3, 4, 5, 6, 0, 3})).string(), 7};
  TrainingOrder order{0, {9}, 4, 2};
  BatchReader batches{*be, shards, order, config, 0, 1, 1, 9};
  Training t;
  Device device{*be, workspace_sizes(config), [&](Arena& arena) {
                  t = make_training(arena, config, be->compute_dtype(), be->master_dtype(), 0, 0, 1);
                }};

  void SetUp() override {
    be->fill(t.control.ok, 1);
    upload_rope(*be, t.activations, config.model);
    initialize(*be, t.master, config.model, config.seed);
  }

  void make(std::int64_t update) { make(update, *comm); }
  void make(std::int64_t update, Comm& ranks) { step(*be, ranks, config, t, batches, update, 1.0); }

  // Every weight and every optimizer state.
  std::vector<double> everything() {
    std::vector<double> all;
    const auto add = [&](Tensor tensor) {
      const auto values = get(*be, tensor);
      all.insert(all.end(), values.begin(), values.end());
    };
    for (const Tensor& matrix : t.master.matrices) add(matrix);
    for (const NamedState& state : named_state(t.optimizer, config.optimizer)) add(state.tensor);
    return all;
  }
};

// One process, where what is exchanged is away until it is waited for, and notes when.
class Late final : public Comm, public Observer {
 public:
  explicit Late(Backend& be) : be_(be) { be.observe(this); }
  Late(const Late&) = delete;
  Late& operator=(const Late&) = delete;
  ~Late() override { be_.observe(nullptr); }

  std::string description() const override { return "late"; }
  int rank() const override { return 0; }
  int size() const override { return 1; }
  int local_rank() const override { return 0; }
  int local_size() const override { return 1; }
  void all_reduce(Tensor, Reduction) override {}
  Ticket start_reduce(Tensor t, int, std::string_view what) override { return start(t, "reduce", what); }
  Ticket start_broadcast(Tensor t, int, std::string_view what) override { return start(t, "broadcast", what); }
  void wait(Ticket ticket) override {
    Away& away = away_.at(static_cast<std::size_t>(ticket));
    note("have", away.what);
    be_.upload(away.tensor, away.values.data());
    worked_ = false;
  }
  std::vector<std::string> all_gather(const std::string& text) override { return {text}; }
  void transfer(void*, std::int64_t, int, int) override {}
  void abort(int code) override { std::_Exit(code); }

  void begin(const Work&) override { worked_ = true; }
  void end() override {}

  std::vector<std::string> notes;  // "work" stands for any number of operations

 private:
  struct Away {
    Tensor tensor;
    std::vector<std::byte> values;
    std::string what;
  };
  Ticket start(Tensor t, std::string_view kind, std::string_view what) {
    note(kind, what);
    std::vector<std::byte> values(static_cast<std::size_t>(t.bytes()));
    be_.download(values.data(), t);
    be_.fill(t, std::numeric_limits<double>::quiet_NaN());
    away_.push_back({t, std::move(values), std::string(what)});
    worked_ = false;
    return static_cast<Ticket>(away_.size() - 1);
  }
  void note(std::string_view kind, std::string_view what) {
    if (worked_) notes.emplace_back("work");
    worked_ = false;
    notes.push_back(fmt::format("{} {}", kind, what));
  }

  Backend& be_;
  std::vector<Away> away_;
  bool worked_ = false;
};

// No gradient or weight is read, and none written, while it is exchanged; what can be done meanwhile is.
TEST_P(Step, WaitsForWhatIsExchangedWhereItIsNeeded) {
  for (const std::int64_t update : {1, 2, 3}) make(update);
  wait_for_weights(*comm, t);
  const auto right = everything();
  SetUp();
  for (const NamedState& state : named_state(t.optimizer, config.optimizer)) be->fill(state.tensor, 0);
  {
    Late late(*be);
    for (const std::int64_t update : {1, 2}) make(update, late);
    late.notes.clear();
    make(3, late);
    EXPECT_EQ(late.notes, (std::vector<std::string>{
                              "work", "have embed.weight", "work", "have blocks.0", "work", "have lm_head.weight",
                              // two micro-batches
                              "work", "reduce lm_head.weight", "work", "reduce blocks.0", "work", "reduce embed.weight",
                              "have lm_head.weight", "have blocks.0", "have embed.weight",  //
                              "work", "broadcast embed.weight", "broadcast blocks.0", "broadcast lm_head.weight"}));
    wait_for_weights(late, t);
  }
  EXPECT_EQ(everything(), right);
}

TEST_P(Step, ChangesEveryMatrix) {
  std::vector<std::vector<double>> before;
  for (const Tensor& matrix : t.master.matrices) before.push_back(get(*be, matrix));
  make(1);
  EXPECT_EQ(be->read(t.control.ok), 1);
  for (std::size_t i = 0; i < before.size(); ++i) EXPECT_NE(get(*be, t.master.matrices[i]), before[i]) << i;
}

// Once a loss or norm was not finite nothing changes any more, so that the host may look later; not even by updates
// whose own numbers are right.
TEST_P(Step, NothingIsAppliedFromTheFirstNumberThatIsNotFinite) {
  make(1);
  ASSERT_EQ(be->read(t.control.ok), 1);
  const auto right = everything();
  const auto embedding = get(*be, t.master.embed);
  for (const double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    be->fill(t.control.ok, 1);
    auto spoilt = embedding;
    spoilt[5 * 6 + 2] = bad;  // token 5
    put(*be, t.master.embed, spoilt);
    make(2);
    EXPECT_FALSE(std::isfinite(be->read(t.loss)));
    EXPECT_EQ(be->read(t.control.ok), 0);
    EXPECT_EQ(first_not_finite(*be, *comm, t), "first found in embed.weight");

    put(*be, t.master.embed, embedding);
    EXPECT_EQ(everything(), right);
    make(3);
    EXPECT_TRUE(std::isfinite(be->read(t.loss)));
    EXPECT_EQ(be->read(t.control.ok), 0);
    EXPECT_EQ(everything(), right);
    for (const double s : get(*be, t.optimizer.head_step)) EXPECT_EQ(s, 0);
  }
}

TEST_P(Step, FirstNotFiniteLooksInTheOrderOfTheComputation) {
  make(1);
  EXPECT_EQ(first_not_finite(*be, *comm, t), "every tensor is finite: the logits or a sum overflow");
  const double nan = std::numeric_limits<double>::quiet_NaN();
  be->fill(t.gradients.embed, nan);  // backward makes it last
  EXPECT_EQ(first_not_finite(*be, *comm, t), "first found in the gradient of embed.weight");
  be->fill(t.gradients.head, nan);
  EXPECT_EQ(first_not_finite(*be, *comm, t), "first found in the gradient of lm_head.weight");
  be->fill(t.activations.hidden, nan);
  EXPECT_EQ(first_not_finite(*be, *comm, t), "first found in the head's input");
  be->fill(t.activations.blocks[0].gate_up, nan);
  EXPECT_EQ(first_not_finite(*be, *comm, t), "first found in blocks.0: gate and up");
  be->fill(t.master.head, nan);
  EXPECT_EQ(first_not_finite(*be, *comm, t), "first found in lm_head.weight");
}

TEST(Numbers, FiniteOfEveryDtype) {
  const double f64[] = {1, -2, 1e300, INFINITY};
  EXPECT_TRUE(all_finite(f64, DType::f64, 3));
  EXPECT_FALSE(all_finite(f64, DType::f64, 4));
  const float f32[] = {1, -2, 1e38F, NAN};
  EXPECT_TRUE(all_finite(f32, DType::f32, 3));
  EXPECT_FALSE(all_finite(f32, DType::f32, 4));
  const std::uint16_t bf16[] = {0x3f80, 0xbf80, 0x7f7f, 0x8000, 0xff80};  // 1, -1, the largest, -0, -infinity
  EXPECT_TRUE(all_finite(bf16, DType::bf16, 4));
  EXPECT_FALSE(all_finite(bf16, DType::bf16, 5));
  EXPECT_TRUE(all_finite(f64, DType::f64, 0));
}

INSTANTIATE_TEST_SUITE_P(Backends, Step, ::testing::Values(ROWNORM_TEST_BACKENDS),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace rownorm
