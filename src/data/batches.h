// Inputs and targets of a micro-batch: sequences of `context` tokens, targets shifted by one.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "data/order.h"
#include "data/shards.h"

namespace rownorm {

// (sequences, context) each, row-major.
struct BatchView {
  std::span<std::int32_t> inputs, targets;
};

struct Batch {
  std::int64_t sequences = 0;
  std::vector<std::int32_t> inputs, targets;
};

// Fills the batch with the sequences from number `first` of the group on, as many as it has room for. Micro-step m of
// rank r of W with micro-batch b: [m*W*b + r*b, m*W*b + (r+1)*b).
void read_training_batch(const BatchView& batch, ShardSet& shards, const Group& group, std::int64_t context,
                         std::int64_t first);

// Validation sequences: all whole blocks of each shard in name order, none dropped, none shuffled.
class ValidationSet {
 public:
  // Error (exit 3) when the shards hold fewer than `sequences` sequences of `context` tokens. Scans what it will use.
  ValidationSet(ShardSet& shards, std::int64_t context, std::int64_t sequences);
  std::int64_t sequences() const { return sequences_; }
  void read(Batch& batch, std::int64_t first, std::int64_t count);  // sequences [first, first + count)

 private:
  ShardSet& shards_;
  std::int64_t context_, sequences_;
  std::vector<std::int64_t> first_of_shard_;  // sequence number at which each shard begins, and the total
};

}  // namespace rownorm
