// The micro-batches of this rank in the order of training, read by a thread of its own while the device works.
//
// Batch i, from 0, has slot i % 3 of host memory that the device copies from by itself, and there three owners in turn:
//   the thread   from the end of upload_next() number i - 1 on, which has waited for the copies of batch i - 3, until
//                the batch has been read: one ahead of the device's, so that this overlaps;
//   the host     until upload_next() number i, which starts its copies to the device;
//   the device   until those copies are made, for which upload_next() number i + 2 waits.
// While a reader lives nobody else uses its shards, and no other thread uses the backend.
#pragma once
#include <array>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <stop_token>
#include <thread>

#include "base/error.h"
#include "data/batches.h"
#include "data/order.h"
#include "data/shards.h"
#include "ops/backend.h"
#include "train/config.h"

namespace rownorm {

class BatchReader {
 public:
  struct Slot {
    Memory memory;
    BatchView tokens;
    bool new_shard = false;      // the first batch of a shard that had not been scanned
    std::optional<Error> error;  // why it could not be read; its tokens are then 0
    Backend::Ticket copied = 0;  // of its copies to the device
  };

  static constexpr std::int64_t slots = 3;
  static std::int64_t slot_bytes(const Config& config);  // of host memory, each

  // Begins to read the batches of rank `rank` of `ranks` of updates first, ..., last (from 1). Error (exit 5): no
  // memory.
  BatchReader(Backend& be, ShardSet& shards, TrainingOrder order, const Config& config, int rank, int ranks,
              std::int64_t first, std::int64_t last);
  BatchReader(const BatchReader&) = delete;
  BatchReader& operator=(const BatchReader&) = delete;

  // Waits until the next batch has been read. std::logic_error behind the last one.
  const Slot& next();
  // Enqueues the copies of the next batch to the device, (sequences * context) i32 each, zeros if it could not be read;
  // then it is no longer the next one.
  void upload_next(Tensor inputs, Tensor targets);

 private:
  void read_all(const std::stop_token& stop);
  void read(Slot& slot, std::int64_t update, std::int64_t first);

  Backend& be_;
  ShardSet& shards_;
  TrainingOrder order_;
  std::int64_t context_, sequences_, micro_batch_;
  int rank_, ranks_;
  std::int64_t first_, last_;  // updates
  std::array<Slot, slots> slots_;

  std::mutex mutex_;  // of what follows; a slot goes from one thread to the other by it
  std::condition_variable_any changed_;
  std::int64_t read_ = 0, uploaded_ = 0;  // how many batches have been
  bool ended_ = false;                    // there are no more to be read

  std::jthread thread_;  // last: it is stopped and joined before anything else goes
};

}  // namespace rownorm
