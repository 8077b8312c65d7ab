#include "data/order.h"

#include <algorithm>
#include <numeric>

#include "base/error.h"
#include "base/random.h"

namespace rownorm {

std::int64_t blocks_of(std::int64_t tokens, std::int64_t context) { return tokens > 0 ? (tokens - 1) / context : 0; }

TrainingOrder::TrainingOrder(std::uint64_t seed, const std::vector<std::int64_t>& shard_tokens, std::int64_t context,
                             std::int64_t sequences)
    : seed_(seed), sequences_(sequences) {
  for (const std::int64_t tokens : shard_tokens) groups_.push_back(blocks_of(tokens, context) / sequences);
  groups_per_epoch_ = std::accumulate(groups_.begin(), groups_.end(), std::int64_t{0});
  if (groups_per_epoch_ == 0)
    fail(Exit::data,
         "[data] no training shard holds one update: the largest has {} tokens, {} * {} + 1 = {} are needed",
         shard_tokens.empty() ? 0 : std::ranges::max(shard_tokens), sequences, context, sequences * context + 1);
}

Group TrainingOrder::group(std::int64_t update) {
  const std::int64_t epoch = update / groups_per_epoch_;
  if (epoch != epoch_) {
    const auto shards = static_cast<std::uint32_t>(groups_.size());
    shard_order_ = shuffled_range(std::array{seed_, static_cast<std::uint64_t>(epoch), std::uint64_t{0}}, shards);
    epoch_ = epoch;
  }

  std::int64_t index = update % groups_per_epoch_;
  auto shard = shard_order_.begin();
  while (index >= groups_[*shard]) index -= groups_[*shard++];

  if (cached_ != std::pair{epoch, std::size_t{*shard}}) {
    const auto groups = static_cast<std::uint32_t>(groups_[*shard]);
    group_order_ = shuffled_range(
        std::array{seed_, static_cast<std::uint64_t>(epoch), std::uint64_t{*shard}, std::uint64_t{1}}, groups);
    cached_ = {epoch, *shard};
  }
  return {epoch, *shard, sequences_ * group_order_[static_cast<std::size_t>(index)]};
}

}  // namespace rownorm
