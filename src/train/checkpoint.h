// Checkpoints: checkpoints/update-00001000/{model.safetensors, optimizer.safetensors, state.json}, written beside,
// synced and renamed when whole.
#pragma once
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "comm/comm.h"
#include "ops/backend.h"
#include "train/config.h"
#include "train/training.h"

namespace rownorm {

// What a run carries from one update to the next besides tensors.
struct RunState {
  std::int64_t update = 0;  // completed updates
  // Since the last record that held train/loss:
  double loss_sum = 0;
  std::int64_t loss_count = 0, clipped_count = 0;
};

std::filesystem::path checkpoint_path(const std::filesystem::path& run, std::int64_t update);

// Writes the checkpoint of state.update, called by all ranks: rank 0 writes what each owns, in one format for any
// number of ranks. `dataset` is what load_checkpoint's caller compares. Error, the same on all ranks: exit 3 when it
// cannot be written, exit 4 when a weight or a state is not finite; either leaves nothing under the final name.
void write_checkpoint(const std::filesystem::path& run, Backend& be, Comm& comm, const Config& config,
                      const Training& t, const RunState& state, const nlohmann::ordered_json& dataset);

// Removes the oldest checkpoints beyond `keep`, sparing the updates of `keep_updates`, and unfinished ones. What is
// newer than `newest`, the one just written, is corrupt, was skipped on resuming and does not count.
void remove_old_checkpoints(const std::filesystem::path& run, std::int64_t newest, std::int64_t keep,
                            const std::vector<std::int64_t>& keep_updates);

// Updates that have a checkpoint directory, ascending; whole or not.
std::vector<std::int64_t> list_checkpoints(const std::filesystem::path& run);

// state.json of a checkpoint directory, complete, whose files have the sizes and digests it names. Error (exit 3)
// otherwise.
nlohmann::ordered_json read_checkpoint_state(const std::filesystem::path& checkpoint);
RunState run_state(const nlohmann::ordered_json& state);  // what such a document says of it

struct Checkpoint {
  std::filesystem::path path;
  nlohmann::ordered_json state;
};

// The newest whole checkpoint of a run, if it has any; a corrupt one is named in a warning and skipped. Error (exit 3)
// when all are corrupt: starting anew would end what a mended disk may still hold.
std::optional<Checkpoint> newest_checkpoint_of(const std::filesystem::path& run);
// `path` itself if it is a checkpoint's directory, else the newest whole checkpoint of the run in it. Error (exit 3).
Checkpoint find_checkpoint(const std::filesystem::path& path);

// Weights, this rank's optimizer state and the run state from a whole checkpoint of this model. Error (exit 3) on
// anything unexpected.
RunState load_checkpoint(const std::filesystem::path& checkpoint, const nlohmann::ordered_json& state, Backend& be,
                         const Config& config, const Training& t);

}  // namespace rownorm
