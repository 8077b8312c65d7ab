// The model of a checkpoint, for the commands that use one without training it.
#pragma once
#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/arena.h"
#include "model/parameters.h"
#include "model/transformer.h"
#include "ops/backend.h"
#include "train/checkpoint.h"
#include "train/config.h"

namespace rownorm {

// A whole checkpoint and the config of its run.
struct TrainedModel {
  Checkpoint checkpoint;
  Config config;
  std::string name() const { return checkpoint.path.string(); }
};

// Of a checkpoint's directory, or the newest of a run's. Error (exit 3) if there is none or it is corrupt.
TrainedModel find_trained_model(const std::filesystem::path& path);

// The tokenizer.json that data/prepare.py left beside the run's data: of both patterns' folders, each file once.
std::vector<std::filesystem::path> tokenizers_beside_data(const Config& config);

// Its weights on a device, ready for forward() on up to `sequences` sequences at a time.
struct LoadedModel {
  std::unique_ptr<Backend> be;
  Parameters weights;  // in the compute precision
  Activations activations;
  Memory memory;  // of all tensors; goes before the backend
};

// `more` asks for the tensors that the command itself needs, in the same allocation (see allocate_tensors). Errors:
// those of open_backend, load_weights and allocate_tensors.
LoadedModel load_model(const TrainedModel& model, const std::string& device, const std::string& precision,
                       std::int64_t sequences, const std::function<void(Arena&, const Backend&)>& more);

}  // namespace rownorm
