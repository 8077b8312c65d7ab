// Which sequences make up which update (PAPER 3, "Order"): bit-compatible with the reference, a pure function of the
// seed and the update's index, so that resuming needs no state.
#pragma once
#include <cstdint>
#include <utility>
#include <vector>

namespace rownorm {

// The consecutive blocks [first_block, first_block + sequences) of one shard that form one optimizer update.
struct Group {
  std::int64_t epoch = 0;
  std::size_t shard = 0;  // index in name order
  std::int64_t first_block = 0;
};

std::int64_t blocks_of(std::int64_t tokens, std::int64_t context);  // floor((tokens - 1) / context), 0 for none

class TrainingOrder {
 public:
  // shard_tokens in name order. Error (exit 3) when no shard holds one update (the message says how many tokens the
  // largest has and how many an update needs).
  TrainingOrder(std::uint64_t seed, const std::vector<std::int64_t>& shard_tokens, std::int64_t context,
                std::int64_t sequences);

  std::int64_t groups_per_epoch() const { return groups_per_epoch_; }
  Group group(std::int64_t update);  // update index from 0; keeps the last epoch's and shard's shuffles

 private:
  std::uint64_t seed_;
  std::int64_t sequences_;
  std::vector<std::int64_t> groups_;  // per shard
  std::int64_t groups_per_epoch_ = 0;
  std::int64_t epoch_ = -1;
  std::vector<std::uint32_t> shard_order_;
  std::pair<std::int64_t, std::size_t> cached_{-1, 0};
  std::vector<std::uint32_t> group_order_;
};

}  // namespace rownorm
