#include "train/batch_reader.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace rownorm {

std::int64_t BatchReader::slot_bytes(const Config& config) {
  return 2 * config.batch.micro_batch * config.model.context * size_of(DType::i32);
}

BatchReader::BatchReader(Backend& be, ShardSet& shards, TrainingOrder order, const Config& config, int rank, int ranks,
                         std::int64_t first, std::int64_t last)
    : be_(be),
      shards_(shards),
      order_(std::move(order)),
      context_(config.model.context),
      sequences_(config.batch.sequences),
      micro_batch_(config.batch.micro_batch),
      rank_(rank),
      ranks_(ranks),
      first_(first),
      last_(last) {
  const auto tokens = static_cast<std::size_t>(micro_batch_ * context_);
  for (Slot& slot : slots_) {
    slot.memory = be.allocate_host(slot_bytes(config));
    auto* ids = static_cast<std::int32_t*>(slot.memory.get());
    slot.tokens = {{ids, tokens}, {ids + tokens, tokens}};
  }
  thread_ = std::jthread([this](const std::stop_token& stop) { read_all(stop); });
}

void BatchReader::read_all(const std::stop_token& stop) {
  std::int64_t i = 0;  // of the batch
  for (std::int64_t update = first_; update <= last_; ++update)
    for (std::int64_t first = rank_ * micro_batch_; first < sequences_; first += ranks_ * micro_batch_, ++i) {
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, stop, [&] { return uploaded_ >= i; });
        if (stop.stop_requested()) return;
      }
      read(slots_[static_cast<std::size_t>(i % slots)], update, first);
      const std::lock_guard lock(mutex_);
      read_ = i + 1;
      changed_.notify_one();
    }
  const std::lock_guard lock(mutex_);
  ended_ = true;
  changed_.notify_one();
}

// Sequences [first, first + micro_batch) of the update.
void BatchReader::read(Slot& slot, std::int64_t update, std::int64_t first) {
  slot.error.reset();
  try {
    const Group group = order_.group(update - 1);
    slot.new_shard = !shards_.scanned(group.shard);
    read_training_batch(slot.tokens, shards_, group, context_, first);
  } catch (...) {
    slot.error = current_error();
    std::ranges::fill(slot.tokens.inputs, 0);
    std::ranges::fill(slot.tokens.targets, 0);
  }
}

const BatchReader::Slot& BatchReader::next() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return read_ > uploaded_ || ended_; });
  if (read_ == uploaded_) throw std::logic_error("[batches] asked for more than there are");
  return slots_[static_cast<std::size_t>(uploaded_ % slots)];
}

void BatchReader::upload_next(Tensor inputs, Tensor targets) {
  next();
  const auto slot_of = [this](std::int64_t i) -> Slot& { return slots_[static_cast<std::size_t>(i % slots)]; };
  const std::int64_t i = uploaded_;  // changed by this thread alone
  Slot& slot = slot_of(i);
  be_.start_upload(inputs, slot.tokens.inputs.data());
  slot.copied = be_.start_upload(targets, slot.tokens.targets.data());
  if (i >= 2) be_.wait(slot_of(i - 2).copied);
  const std::lock_guard lock(mutex_);
  uploaded_ = i + 1;
  changed_.notify_one();
}

}  // namespace rownorm
