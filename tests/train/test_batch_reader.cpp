#include <gtest/gtest.h>

#include <filesystem>
#include <limits>
#include <string>
#include <vector>

#include "base/temporary_folder.h"
#include "data/files.h"
#include "device.h"
#include "train/batch_reader.h"

namespace rownorm {
namespace {

using testing::Device;

// 21 sequences of 3 tokens are 3 updates of 6, 9 one: 4 updates an epoch.
constexpr std::int64_t context = 3, sequences = 6, vocab = 100;
const std::vector<std::int64_t> shard_tokens{64, 28};

class Batches : public ::testing::TestWithParam<const char*> {
 protected:
  TemporaryFolder folder;
  std::unique_ptr<Backend> be = testing::open(GetParam());
  TrainingOrder order{5, shard_tokens, context, sequences};

  Batches() {
    write_shard(folder / "s_0.bin", counting(64));
    write_shard(folder / "s_1.bin", counting(28, 70));
  }
  ShardSet shards() const { return {"train", (folder / "s_*.bin").string(), vocab}; }

  static Config config(std::int64_t micro_batch) {
    Config c;
    c.model.context = context;
    c.batch = {.sequences = sequences, .micro_batch = micro_batch};
    return c;
  }
  static std::int64_t tokens(std::int64_t batch_sequences) { return batch_sequences * context; }
};

// What was uploaded is copied aside on the device and looked at only at the end: a slot that was filled again before
// the device had copied from it would show (in the lazy mode of the stand-in for CUDA the device copies last of all).
TEST_P(Batches, ReachTheDeviceInTheOrderOfTraining) {
  constexpr std::int64_t first = 3, last = 11;  // of the first epoch into the third
  for (const auto& [ranks, b] : {std::pair<int, std::int64_t>{1, 6}, {1, 1}, {2, 3}, {3, 1}})
    for (int rank = 0; rank < ranks; ++rank) {
      const std::int64_t steps = sequences / (b * ranks), count = steps * (last - first + 1);
      Tensor inputs, targets, history;
      const Device device(*be, {}, [&, b = b](Arena& arena) {
        inputs = arena.add("test", DType::i32, {tokens(b)});
        targets = arena.add("test", DType::i32, {tokens(b)});
        history = arena.add("test", DType::i32, {2 * count, tokens(b)});
      });
      ShardSet read = shards(), again = shards();
      std::vector<std::int32_t> expected, found(static_cast<std::size_t>(history.size()));
      std::vector<bool> seen(shard_tokens.size());
      BatchReader reader(*be, read, order, config(b), rank, ranks, first, last);
      for (std::int64_t i = 0; i < count; ++i) {
        const Group group = order.group(first + i / steps - 1);
        EXPECT_EQ(reader.next().new_shard, !seen[group.shard]);
        EXPECT_FALSE(reader.next().error);
        seen[group.shard] = true;
        reader.upload_next(inputs, targets);
        be->copy(history.rows(2 * i, 2 * i + 1).reshape(inputs.shape), inputs);
        be->copy(history.rows(2 * i + 1, 2 * i + 2).reshape(inputs.shape), targets);

        std::vector<std::int32_t> in(static_cast<std::size_t>(tokens(b))), out(in);
        read_training_batch({in, out}, again, group, context, (i % steps * ranks + rank) * b);
        expected.insert(expected.end(), in.begin(), in.end());
        expected.insert(expected.end(), out.begin(), out.end());
      }
      be->download(found.data(), history);
      EXPECT_EQ(found, expected) << ranks << " ranks, rank " << rank << ", micro-batch " << b;
      EXPECT_THROW(reader.next(), std::logic_error);
      EXPECT_THROW(reader.upload_next(inputs, targets), std::logic_error);
    }
}

// The thread's error waits until its batch's turn has come; what is uploaded then are zeros.
TEST_P(Batches, CarryTheErrorOfTheirShard) {
  write_shard(folder / "s_1.bin", counting(28, 73));  // its last token is 100
  ShardSet bad = shards();
  Tensor inputs, targets;
  const Device device(*be, {}, [&](Arena& arena) {
    inputs = arena.add("test", DType::i32, {tokens(3)});
    targets = arena.add("test", DType::i32, {tokens(3)});
  });
  BatchReader reader(*be, bad, order, config(3), 0, 1, 1, 8);
  int errors = 0;
  for (std::int64_t update = 1; update <= 8; ++update)
    for (int m = 0; m < 2; ++m) {
      const bool expected = order.group(update - 1).shard == 1;
      const BatchReader::Slot& next = reader.next();
      ASSERT_EQ(next.error.has_value(), expected) << update;
      if (expected) {
        EXPECT_TRUE(next.new_shard);
        EXPECT_EQ(next.error->code(), Exit::data);
        EXPECT_EQ(next.error->what(),
                  "[shard] " + (folder / "s_1.bin").string() +
                      ": token 27 of the train data is 100, must be less than model.vocab_size 100");
        ++errors;
      }
      be->fill(inputs, 7);
      be->fill(targets, 7);
      reader.upload_next(inputs, targets);
      std::vector<std::int32_t> in(9), out(9);
      be->download(in.data(), inputs);
      be->download(out.data(), targets);
      EXPECT_EQ(in == std::vector<std::int32_t>(9), expected);
      EXPECT_EQ(out == std::vector<std::int32_t>(9), expected);
    }
  EXPECT_EQ(errors, 4);  // of two epochs
}

TEST_P(Batches, ReaderGoesAtAnyMoment) {
  Tensor inputs, targets;
  const Device device(*be, {}, [&](Arena& arena) {
    inputs = arena.add("test", DType::i32, {tokens(1)});
    targets = arena.add("test", DType::i32, {tokens(1)});
  });
  ShardSet read = shards();
  for (int taken = 0; taken < 8; ++taken) {
    BatchReader reader(*be, read, order, config(1), 0, 1, 1, std::numeric_limits<std::int64_t>::max());
    for (int i = 0; i < taken; ++i) reader.upload_next(inputs, targets);
    if (taken % 2 == 0) reader.next();
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, Batches, ::testing::Values(ROWNORM_TEST_BACKENDS),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace rownorm
