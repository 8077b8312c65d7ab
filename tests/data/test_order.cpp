#include <gtest/gtest.h>

#include <vector>

#include "base/expect_error.h"
#include "data/order.h"
#include "golden.h"

namespace rownorm {
namespace {

using Json = nlohmann::json;

std::vector<std::int64_t> shard_tokens(const Json& loader) {
  std::vector<std::int64_t> tokens;
  for (const auto& shard : loader["shards"]) tokens.push_back(shard["num_tokens"]);
  return tokens;
}

// A micro-batch as the golden file writes it: [epoch, shard name, [blocks]].
Json micro_batch(const Json& loader, std::int64_t epoch, std::size_t shard, std::int64_t first, std::int64_t batch) {
  Json blocks = Json::array();
  for (std::int64_t i = 0; i < batch; ++i) blocks.push_back(first + i);
  return {epoch, loader["shards"][shard]["name"], blocks};
}

TEST(TrainingOrder, IsTheReferencesForEveryRank) {
  const Json golden = golden::json("data_order.json");
  for (const auto& loader : golden["loaders"]) {
    const std::int64_t b = loader["batch"], W = loader["world_size"], accumulation = loader["accumulation"];
    ASSERT_GE(loader["epochs_seen"].get<int>(), 2);
    TrainingOrder order(loader["seed"], shard_tokens(loader), loader["seq_len"], W * b * accumulation);
    ASSERT_EQ(loader["ranks"].size(), static_cast<std::size_t>(W));
    for (std::int64_t rank = 0; rank < W; ++rank) {
      const auto& expected = loader["ranks"][static_cast<std::size_t>(rank)];
      ASSERT_EQ(expected.size(), loader["microbatches"].get<std::size_t>());
      for (std::size_t k = 0; k < expected.size(); ++k) {
        const auto step = static_cast<std::int64_t>(k);
        const Group group = order.group(step / accumulation);
        const std::int64_t first = group.first_block + (step % accumulation) * W * b + rank * b;
        ASSERT_EQ(micro_batch(loader, group.epoch, group.shard, first, b), expected[k])
            << "seed " << loader["seed"] << ", rank " << rank << ", micro-batch " << k;
      }
    }
  }
}

// The reference's validation walks the same groups unshuffled, accumulation 1.
TEST(ValidationOrder, WholeGroupsInNameOrderAreTheReferences) {
  const Json golden = golden::json("data_order.json");
  int wraps = 0;
  for (const auto& loader : golden["validation_loaders"]) {
    const std::int64_t b = loader["batch"], W = loader["world_size"], rank = loader["rank"];
    const auto tokens = shard_tokens(loader);
    std::vector<Json> epoch;
    for (std::size_t s = 0; s < tokens.size(); ++s)
      for (std::int64_t g = 0; g < blocks_of(tokens[s], loader["seq_len"]) / (W * b); ++g)
        epoch.push_back(micro_batch(loader, 0, s, g * W * b + rank * b, b));
    const auto& expected = loader["sequence"];
    wraps += expected.size() > epoch.size();
    for (std::size_t k = 0; k < expected.size(); ++k) {
      epoch[k % epoch.size()][0] = k / epoch.size();
      ASSERT_EQ(epoch[k % epoch.size()], expected[k]) << k;
    }
  }
  EXPECT_GT(wraps, 0);  // the next epoch is the same
}

TEST(TrainingOrder, AnyUpdateCanBeAskedForInAnyOrder) {
  const std::vector<std::int64_t> tokens{777, 1500, 40, 1000};  // the third holds no update and is skipped
  TrainingOrder forward(3, tokens, 16, 5);
  EXPECT_EQ(forward.groups_per_epoch(), 48 / 5 + 93 / 5 + 62 / 5);
  std::vector<Group> groups;
  for (std::int64_t u = 0; u < 4 * forward.groups_per_epoch(); ++u) groups.push_back(forward.group(u));
  TrainingOrder jumping(3, tokens, 16, 5);
  const auto n = static_cast<std::int64_t>(groups.size());
  for (std::int64_t k = 0; k < n; ++k) {
    const std::int64_t u = k * 61 % n;  // 61 and n = 156 have no common factor: every update, never the next one
    const Group group = jumping.group(u), expected = groups[static_cast<std::size_t>(u)];
    EXPECT_EQ(group.epoch, expected.epoch);
    EXPECT_EQ(group.shard, expected.shard);
    EXPECT_EQ(group.first_block, expected.first_block);
  }
}

TEST(TrainingOrder, AnEpochHoldsEveryGroupOnce) {
  const std::vector<std::int64_t> tokens{777, 1500, 1000};
  TrainingOrder order(0, tokens, 16, 3);
  for (std::int64_t epoch = 0; epoch < 3; ++epoch) {
    std::vector<std::vector<int>> seen{std::vector<int>(48 / 3), std::vector<int>(93 / 3), std::vector<int>(62 / 3)};
    for (std::int64_t u = 0; u < order.groups_per_epoch(); ++u) {
      const Group group = order.group(epoch * order.groups_per_epoch() + u);
      EXPECT_EQ(group.epoch, epoch);
      EXPECT_EQ(group.first_block % 3, 0);
      ++seen.at(group.shard).at(static_cast<std::size_t>(group.first_block / 3));
    }
    for (const auto& shard : seen)
      for (const int count : shard) EXPECT_EQ(count, 1);
  }
}

TEST(TrainingOrder, BlocksNeedATokenAfterTheLast) {
  EXPECT_EQ(blocks_of(0, 4), 0);
  EXPECT_EQ(blocks_of(1, 4), 0);
  EXPECT_EQ(blocks_of(4, 4), 0);
  EXPECT_EQ(blocks_of(5, 4), 1);
  EXPECT_EQ(blocks_of(8, 4), 1);
  EXPECT_EQ(blocks_of(9, 4), 2);
  EXPECT_EQ(blocks_of(100'000'000, 2048), 48828);
}

TEST(TrainingOrder, TooFewTokensForOneUpdateAreNamed) {
  EXPECT_EQ(TrainingOrder(0, {512, 513}, 32, 16).groups_per_epoch(), 1);
  expect_error(Exit::data,
               "[data] no training shard holds one update: the largest has 512 tokens, 16 * 32 + 1 = 513 are needed",
               [] {
                 TrainingOrder(0, {100, 512, 7}, 32, 16);
               });
}

}  // namespace
}  // namespace rownorm
