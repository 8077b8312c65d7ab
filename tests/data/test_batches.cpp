#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

#include "base/expect_error.h"
#include "base/temporary_folder.h"
#include "data/batches.h"
#include "data/files.h"
#include "golden.h"

namespace rownorm {
namespace {

// Row `row` holds the tokens first, first + 1, ... of a counting() shard, its targets one later.
void expect_row(const Batch& batch, std::int64_t row, std::int64_t context, std::int64_t first) {
  for (std::int64_t i = 0; i < context; ++i) {
    const auto at = static_cast<std::size_t>(row * context + i);
    ASSERT_EQ(batch.inputs.at(at), first + i) << "row " << row << ", position " << i;
    ASSERT_EQ(batch.targets.at(at), first + i + 1) << "row " << row << ", position " << i;
  }
}

Batch training_batch(ShardSet& shards, const Group& group, std::int64_t context, std::int64_t first,
                     std::int64_t count) {
  const auto tokens = static_cast<std::size_t>(count * context);
  Batch batch{count, std::vector<std::int32_t>(tokens), std::vector<std::int32_t>(tokens)};
  read_training_batch({batch.inputs, batch.targets}, shards, group, context, first);
  return batch;
}

TEST(TrainingBatch, HoldsTheBlocksOfItsGroup) {
  const TemporaryFolder folder;
  write_shard(folder / "s_0.bin", counting(500));
  write_shard(folder / "s_1.bin", counting(700, 1000));
  ShardSet shards("train", (folder / "s_*.bin").string(), 65536);
  const Batch batch = training_batch(shards, {.epoch = 0, .shard = 1, .first_block = 6}, 33, 4, 3);
  for (std::int64_t row = 0; row < 3; ++row) expect_row(batch, row, 33, 1000 + (6 + 4 + row) * 33);
  // The last block of the shard: its last target is the shard's last usable token.
  expect_row(training_batch(shards, {.epoch = 0, .shard = 0, .first_block = 14}, 33, 0, 1), 0, 33, 14 * 33);
}

// An update's examples do not depend on how ranks and micro-steps share them.
TEST(TrainingBatch, EverySplitOfAnUpdateReadsTheSameExamples) {
  ShardSet shards("train", golden::path("trajectory_main/data/fineweb_train_*.bin"), 200);
  ASSERT_EQ(shards.shards().size(), 2u);
  ASSERT_EQ(shards.tokens(), 2 * 30000);
  constexpr std::int64_t sequences = 24, context = 31;
  TrainingOrder order(5, {30000, 30000}, context, sequences);
  const Group group = order.group(7);
  const Batch whole = training_batch(shards, group, context, 0, sequences);
  for (const auto& [W, b] : {std::pair{1, 24}, {1, 3}, {2, 4}, {3, 8}, {8, 1}}) {
    std::vector<std::int32_t> inputs, targets;
    for (std::int64_t m = 0; m < sequences / (W * b); ++m)
      for (std::int64_t r = 0; r < W; ++r) {
        const Batch part = training_batch(shards, group, context, m * W * b + r * b, b);
        inputs.insert(inputs.end(), part.inputs.begin(), part.inputs.end());
        targets.insert(targets.end(), part.targets.begin(), part.targets.end());
      }
    EXPECT_EQ(inputs, whole.inputs) << W << " ranks, micro-batch " << b;
    EXPECT_EQ(targets, whole.targets) << W << " ranks, micro-batch " << b;
  }
}

TEST(ValidationSet, ReadsWholeBlocksOfEveryShardInNameOrder) {
  const TemporaryFolder folder;
  write_shard(folder / "v_2.bin", counting(26, 2000));  // 5 blocks of 5
  write_shard(folder / "v_0.bin", counting(11, 0));     // 2
  write_shard(folder / "v_1.bin", counting(5, 1000));   // none: the target of its last token is missing
  write_shard(folder / "v_3.bin", counting(10, 3000));  // 1
  ShardSet shards("validation", (folder / "v_*.bin").string(), 65536);
  ValidationSet validation(shards, 5, 8);
  const std::vector<std::int64_t> first_tokens{0, 5, 2000, 2005, 2010, 2015, 2020, 3000};
  for (const std::int64_t count : {1, 2, 3, 5, 8}) {
    for (std::int64_t first = 0; first < 8; first += count) {
      Batch batch;
      validation.read(batch, first, std::min(count, 8 - first));
      ASSERT_EQ(batch.sequences, std::min(count, 8 - first));
      for (std::int64_t row = 0; row < batch.sequences; ++row)
        expect_row(batch, row, 5, first_tokens.at(static_cast<std::size_t>(first + row)));
    }
  }
  Batch batch;
  EXPECT_THROW(validation.read(batch, 7, 2), std::logic_error);
  EXPECT_THROW(validation.read(batch, -1, 1), std::logic_error);
  expect_error(Exit::data,
               "[data] the validation shards hold 40 tokens in whole sequences of 5, evaluation.tokens 45 are needed",
               [&] { ValidationSet(shards, 5, 9); });
}

TEST(ValidationSet, ScansWhatItWillUseBeforeTheFirstRead) {
  const TemporaryFolder folder;
  write_shard(folder / "v_0.bin", counting(11));
  const auto bad = write_shard(folder / "v_1.bin", counting(11, 95));
  ShardSet shards("validation", (folder / "v_*.bin").string(), 100);
  EXPECT_EQ(ValidationSet(shards, 5, 2).sequences(), 2);
  expect_error(
      Exit::data,
      "[shard] " + bad.string() + ": token 5 of the validation data is 100, must be less than model.vocab_size 100",
      [&] { ValidationSet(shards, 5, 3); });
}

}  // namespace
}  // namespace rownorm
