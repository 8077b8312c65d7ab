// rownorm inspect: what a shard, a safetensors file, a checkpoint or a run holds, as JSON on stdout.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/json.h"
#include "base/safetensors.h"
#include "cmd/commands.h"
#include "comm/comm.h"
#include "data/shards.h"
#include "geometry/diameter.h"
#include "ops/open.h"
#include "train/checkpoint.h"
#include "train/config.h"
#include "train/metrics.h"
#include "train/run_directory.h"

namespace rownorm {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

ordered_json inspect_shards(const std::string& pattern) {
  ordered_json list = ordered_json::array();
  std::int64_t total = 0;
  for (const fs::path& path : expand_pattern(pattern)) {
    const MappedFile file("shard", path);
    const ShardInfo info = parse_shard(file.bytes(), path);
    const auto* tokens = reinterpret_cast<const std::uint16_t*>(file.bytes().data() + shard_header_bytes);
    const auto [low, high] = std::minmax_element(tokens, tokens + info.tokens);  // a shard holds at least one
    list.push_back({{"path", path.string()},
                    {"tokens", info.tokens},
                    {"smallest_token", *low},
                    {"largest_token", *high},
                    {"header_xxh128", info.header_digest},
                    {"xxh128", digest(file.bytes())}});
    total += info.tokens;
  }
  return {{"kind", "shards"}, {"shards", list}, {"tokens", total}};
}

// The rows of a two-dimensional tensor as a cloud, its diameter by the backend that holds its dtype exactly.
ordered_json tensor_diameter(const SafetensorsFile& file, const std::string& name) {
  const auto& entry = file.at(name);
  if (entry.shape.size() != 2 || entry.elements() == 0)
    fail(Exit::usage, "[inspect] --diameter {}: has {} dimensions and {} elements, expected a matrix", name,
         entry.shape.size(), entry.elements());
  const auto be = open_backend(entry.dtype == "F64" ? "reference" : "cpu", "auto");
  const std::int64_t rows = entry.shape[0], cols = entry.shape[1];
  WorkspaceSizes sizes;
  sizes.vocab = rows;
  sizes.width = cols;
  sizes.diameter = true;
  Tensor matrix, workspace;
  DiameterTensors tensors;
  const Memory memory = allocate_tensors(*be, [&](Arena& arena) {
    matrix = arena.add("matrix", be->master_dtype(), {rows, cols});
    tensors = make_diameter(arena, rows);
    workspace = arena.add("workspace", DType::u8, {be->workspace_bytes(sizes)});
  });
  be->set_workspace(workspace, sizes);
  if (!file.read(name, matrix))
    fail(Exit::numbers, "[inspect] {}: {} holds a value that is not finite", file.path().string(), name);
  const auto comm = make_single_process();
  const StepGeometry g = measure_step(*be, *comm, tensors, matrix);
  return {{"tensor", name},
          {"diameter", g.diameter},
          {"pair", g.pair},
          {"row_norm_max", g.row_norm_max},
          {"row_norm_median", g.row_norm_median}};
}

ordered_json inspect_safetensors(const fs::path& path, const std::string& diameter) {
  const SafetensorsFile file(path);
  ordered_json tensors = ordered_json::array();
  std::int64_t elements = 0;
  for (const auto& [name, entry] : file.entries()) {
    tensors.push_back({{"name", name}, {"dtype", entry.dtype}, {"shape", entry.shape}});
    elements += entry.elements();
  }
  ordered_json result = {{"kind", "safetensors"}, {"path", path.string()}};
  if (!diameter.empty()) {
    result["diameter"] = tensor_diameter(file, diameter);
  } else {
    if (!file.metadata().empty()) result["metadata"] = file.metadata();
    result["elements"] = elements;
    result["tensors"] = tensors;
  }
  return result;
}

ordered_json inspect_checkpoint(const fs::path& path, const std::string& diameter) {
  if (!diameter.empty()) {
    const bool is_state = SafetensorsFile(path / "optimizer.safetensors").contains(diameter);
    return inspect_safetensors(path / (is_state ? "optimizer.safetensors" : "model.safetensors"), diameter);
  }
  ordered_json state = read_checkpoint_state(path);
  return {{"kind", "checkpoint"},
          {"path", path.string()},
          {"update", state.at("update")},
          {"files", state.at("files")},
          {"config", state.at("config")},
          {"model", inspect_safetensors(path / "model.safetensors", "")},
          {"optimizer", inspect_safetensors(path / "optimizer.safetensors", "")}};
}

ordered_json inspect_run(const fs::path& path) {
  const Config config = load_config(path / "config.json", {});
  ordered_json checkpoints = ordered_json::array();
  std::int64_t newest = 0;
  for (const std::int64_t update : list_checkpoints(path)) {
    ordered_json entry = {{"update", update}, {"whole", true}};
    try {
      read_checkpoint_state(checkpoint_path(path, update));
      newest = update;
    } catch (const Error& e) {
      entry["whole"] = false;
      entry["error"] = e.what();
    }
    checkpoints.push_back(entry);
  }
  const fs::path metrics = path / "metrics.jsonl";
  return {{"kind", "run"},
          {"path", path.string()},
          {"name", config.name},
          {"updates", config.updates()},
          {"last_update", config.last_update()},
          {"state", newest >= config.last_update() ? "finished"
                    : newest > 0                   ? "can be resumed"
                                                   : "has no checkpoint"},
          {"checkpoints", checkpoints},
          {"latest", fs::exists(metrics) ? latest_metrics(metrics) : ordered_json::object()}};
}

}  // namespace

int inspect_command(const InspectOptions& options) {
  const fs::path path = options.path;
  ordered_json result;
  if (fs::is_directory(path)) {
    if (fs::exists(path / "state.json")) {
      result = inspect_checkpoint(path, options.diameter);
    } else if (!fs::exists(path / "config.json")) {
      fail(Exit::data, "[inspect] {}: neither a run's nor a checkpoint's directory (no config.json or state.json)",
           options.path);
    } else if (options.diameter.empty()) {
      result = inspect_run(path);
    } else {
      result = inspect_checkpoint(find_checkpoint(path).path, options.diameter);
    }
  } else if (path.extension() == ".safetensors") {
    result = inspect_safetensors(path, options.diameter);
  } else if (options.diameter.empty()) {
    result = inspect_shards(options.path);
  } else {
    fail(Exit::usage, "[inspect] --diameter {}: {} is not a safetensors file", options.diameter, options.path);
  }
  fmt::print("{}\n", json_text(result, 2));
  return static_cast<int>(Exit::ok);
}

}  // namespace rownorm
