#include "data/batches.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>

#include "base/error.h"

namespace rownorm {

namespace {

// Sequence `row` of the batch is block `block` of shard s: inputs [block * context, block * context + context), targets
// one later.
void copy_block(const BatchView& batch, std::int64_t row, ShardSet& shards, std::size_t s, std::int64_t block,
                std::int64_t context) {
  const auto tokens =
      shards.tokens_of(s).subspan(static_cast<std::size_t>(block * context), static_cast<std::size_t>(context + 1));
  std::copy(tokens.begin(), tokens.end() - 1, batch.inputs.begin() + row * context);
  std::copy(tokens.begin() + 1, tokens.end(), batch.targets.begin() + row * context);
  const auto copied = [&](std::span<const std::int32_t> ids) {
    return ids.subspan(static_cast<std::size_t>(row * context), static_cast<std::size_t>(context));
  };
  shards.check_copied(s, copied(batch.inputs));
  shards.check_copied(s, copied(batch.targets));
}

}  // namespace

void read_training_batch(const BatchView& batch, ShardSet& shards, const Group& group, std::int64_t context,
                         std::int64_t first) {
  for (std::int64_t i = 0; i * context < std::ssize(batch.inputs); ++i)
    copy_block(batch, i, shards, group.shard, group.first_block + first + i, context);
}

ValidationSet::ValidationSet(ShardSet& shards, std::int64_t context, std::int64_t sequences)
    : shards_(shards), context_(context), sequences_(sequences), first_of_shard_{0} {
  for (const ShardInfo& shard : shards.shards())
    first_of_shard_.push_back(first_of_shard_.back() + blocks_of(shard.tokens, context));
  if (first_of_shard_.back() < sequences)
    fail(Exit::data,
         "[data] the validation shards hold {} tokens in whole sequences of {}, evaluation.tokens {} are needed",
         first_of_shard_.back() * context, context, sequences * context);
  for (std::size_t s = 0; first_of_shard_[s] < sequences; ++s) shards.tokens_of(s);
}

void ValidationSet::read(Batch& batch, std::int64_t first, std::int64_t count) {
  if (first < 0 || count < 0 || first + count > sequences_)
    throw std::logic_error(fmt::format("[data] validation sequences [{}, {}) of {}", first, first + count, sequences_));
  batch.sequences = count;
  batch.inputs.resize(static_cast<std::size_t>(count * context_));
  batch.targets.resize(batch.inputs.size());
  for (std::int64_t i = 0; i < count; ++i) {
    const auto next = std::ranges::upper_bound(first_of_shard_, first + i);
    const auto shard = static_cast<std::size_t>(next - first_of_shard_.begin() - 1);
    copy_block({batch.inputs, batch.targets}, i, shards_, shard, first + i - first_of_shard_[shard], context_);
  }
}

}  // namespace rownorm
