#include "train/checkpoint.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <span>
#include <string>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/safetensors.h"
#include "train/fields.h"
#include "train/log.h"
#include "train/numbers.h"
#include "train/run_directory.h"

namespace rownorm {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

constexpr std::int64_t host_chunk = 1 << 20;  // elements staged on the host at a time
constexpr int state_format = 1;
const char* const model_file = "model.safetensors";
const char* const optimizer_file = "optimizer.safetensors";

// A tensor of a checkpoint's file: matrix rows, of which each rank holds some.
struct Stored {
  std::string name;
  std::int64_t rows, cols;
  struct Part {
    int owner;
    std::int64_t begin;  // row
    Tensor tensor;       // null where this rank does not have it
  };
  std::vector<Part> parts;  // in row order
};

std::vector<Stored> model_tensors(const Training& t) {
  std::vector<Stored> tensors;
  for (const ParameterInfo& p : t.optimizer.table) tensors.push_back({p.name, p.rows, p.cols, {}});
  for (const Piece& p : t.optimizer.pieces)
    tensors[p.parameter].parts.push_back({p.owner, p.begin, t.master.matrices[p.parameter].rows(p.begin, p.end)});
  return tensors;
}

std::vector<Stored> optimizer_tensors(const Training& t, const Config& config) {
  std::vector<Stored> tensors;
  for (const auto& [name, piece, tensor] : named_state(t.optimizer, config.optimizer)) {
    const ParameterInfo& p = t.optimizer.table[piece.parameter];
    if (tensors.empty() || tensors.back().name != name) tensors.push_back({name, p.rows, p.cols, {}});
    tensors.back().parts.push_back({piece.owner, piece.begin, tensor});
  }
  return tensors;
}

// The number of rows of a part: known on every rank.
std::int64_t rows_of(const Stored& s, std::size_t part) {
  return (part + 1 < s.parts.size() ? s.parts[part + 1].begin : s.rows) - s.parts[part].begin;
}

// Rank 0 writes what the owners send it. After an error of its own a rank goes on sending and receiving, so that none
// waits for another; all throw it at the end.
void write_tensors(const fs::path& path, Backend& be, Comm& comm, const std::vector<Stored>& tensors,
                   std::int64_t update) {
  std::optional<Error> error;
  std::optional<SafetensorsWriter> writer;
  const auto attempt = [&](auto work) {
    try {
      if (!error) work();
    } catch (...) {
      error = current_error();
    }
  };
  if (comm.rank() == 0)
    attempt([&] {
      std::vector<SafetensorsWriter::Declaration> declarations;
      for (const Stored& s : tensors) declarations.push_back({s.name, be.master_dtype(), {s.rows, s.cols}});
      writer.emplace(path, declarations);
    });
  std::vector<std::byte> buffer(static_cast<std::size_t>(host_chunk * size_of(be.master_dtype())));
  for (const Stored& s : tensors)
    for (std::size_t i = 0; i < s.parts.size(); ++i) {
      const auto& [owner, begin, tensor] = s.parts[i];
      const bool mine = owner == comm.rank();
      if (!mine && comm.rank() != 0) continue;
      const std::int64_t size = rows_of(s, i) * s.cols;
      for (std::int64_t first = 0; first < size; first += host_chunk) {
        const std::int64_t count = std::min(host_chunk, size - first), bytes = count * size_of(be.master_dtype());
        if (mine) {
          be.download(buffer.data(), tensor.reshape({size}).rows(first, first + count));
          if (!error && !all_finite(buffer.data(), be.master_dtype(), count))
            error = Error(Exit::numbers, fmt::format("[checkpoint] update {}: {} is not finite; no checkpoint written",
                                                     update, s.name));
        }
        comm.transfer(buffer.data(), bytes, owner, 0);
        if (comm.rank() == 0) attempt([&] { writer->write(buffer.data(), static_cast<std::size_t>(bytes)); });
      }
    }
  together(comm, [&] {
    if (error) throw Error(*error);
    if (writer) writer->close();
  });
}

// Every part that this rank has.
void read_tensors(const fs::path& path, Backend& be, const std::vector<Stored>& tensors) {
  const SafetensorsFile file(path);
  if (file.entries().size() != tensors.size())
    fail(Exit::data, "[checkpoint] {}: holds {} tensors, expected {}", path.string(), file.entries().size(),
         tensors.size());
  std::vector<std::byte> buffer(static_cast<std::size_t>(host_chunk * size_of(be.master_dtype())));
  for (const Stored& s : tensors) {
    if (file.at(s.name).shape != std::vector<std::int64_t>{s.rows, s.cols})
      fail(Exit::data, "[checkpoint] {}: {} has another shape, expected ({}, {})", path.string(), s.name, s.rows,
           s.cols);
    for (const Stored::Part& part : s.parts) {
      if (!part.tensor.data) continue;
      const Tensor flat = part.tensor.reshape({part.tensor.size()});
      for (std::int64_t first = 0; first < flat.size(); first += host_chunk) {
        const Tensor chunk = flat.rows(first, std::min(first + host_chunk, flat.size()));
        const Tensor host{buffer.data(), chunk.dtype, chunk.shape};
        if (!file.read(s.name, host, part.begin * s.cols + first))
          fail(Exit::data, "[checkpoint] {}: {} holds a value that is not finite", path.string(), s.name);
        be.upload(chunk, host.data);
      }
    }
  }
}

ordered_json describe_file(const fs::path& path) {
  const MappedFile file("checkpoint", path);
  return {{"bytes", file.bytes().size()}, {"xxh128", digest(file.bytes())}};
}

// Where a checkpoint is while it is being written or removed.
fs::path unfinished_path(const fs::path& checkpoint) {
  return checkpoint.parent_path() / fmt::format(".{}.unfinished", checkpoint.filename().string());
}

std::string digest_of(const ordered_json& document) {
  const std::string text = json_text(document);
  return digest(std::as_bytes(std::span(text)));
}

void check_kind(const fs::path& path, bool right, const char* key) {
  if (!right) fail(Exit::data, "[checkpoint] {}: {} is not what a checkpoint's state holds", path.string(), key);
}

// "update-00001000" -> 1000, anything else -> -1.
std::int64_t update_of(const std::string& name) {
  constexpr std::string_view prefix = "update-";
  std::int64_t update = -1;
  if (!name.starts_with(prefix)) return -1;
  const char* end = name.data() + name.size();
  const auto [stop, error] = std::from_chars(name.data() + prefix.size(), end, update);
  return error == std::errc() && stop == end && update >= 0 ? update : -1;
}

}  // namespace

fs::path checkpoint_path(const fs::path& run, std::int64_t update) {
  return run / "checkpoints" / fmt::format("update-{:08}", update);
}

void write_checkpoint(const fs::path& run, Backend& be, Comm& comm, const Config& config, const Training& t,
                      const RunState& state, const ordered_json& dataset) {
  const fs::path final_path = checkpoint_path(run, state.update);
  const fs::path unfinished = unfinished_path(final_path);
  try {
    on_first_rank(comm, [&] {
      std::error_code error;
      fs::remove_all(unfinished, error);
      fs::create_directory(unfinished.parent_path(), error);  // not the run's: if that is gone, so are its metrics
      if (!error) fs::create_directory(unfinished, error);
      if (error) fail(Exit::data, "[checkpoint] {}: {}", unfinished.string(), error.message());
    });
    write_tensors(unfinished / model_file, be, comm, model_tensors(t), state.update);
    write_tensors(unfinished / optimizer_file, be, comm, optimizer_tensors(t, config), state.update);
    on_first_rank(comm, [&] {
      ordered_json document = {
          {"format", state_format},
          {"update", state.update},
          {"tokens", state.update * config.tokens_per_update()},
          {"running",
           {{"loss_sum", state.loss_sum}, {"loss_count", state.loss_count}, {"clipped_count", state.clipped_count}}},
          {"files",
           {{model_file, describe_file(unfinished / model_file)},
            {optimizer_file, describe_file(unfinished / optimizer_file)}}},
          {"dataset", dataset},
          {"config", to_json(config)}};
      document["xxh128"] = digest_of(document);
      write_text_atomically(unfinished / "state.json", json_text(document, 1) + "\n");
      sync_directory(unfinished);
      std::error_code error;
      fs::remove_all(final_path, error);  // a corrupt one that resuming skipped
      rename_path(unfinished, final_path);
      sync_directory(final_path.parent_path());
      sync_directory(run);
    });
  } catch (...) {
    std::error_code error;
    if (comm.rank() == 0) fs::remove_all(unfinished, error);
    throw;
  }
}

std::vector<std::int64_t> list_checkpoints(const fs::path& run) {
  std::vector<std::int64_t> updates;
  std::error_code error;
  const fs::path folder = run / "checkpoints";
  if (fs::symlink_status(folder, error).type() == fs::file_type::not_found) return updates;
  // One that is there but cannot be listed (an unmounted disk, no permission) is not the same as none.
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error))
    if (const std::int64_t update = update_of(entry->path().filename().string()); update >= 0)
      updates.push_back(update);
  if (error) fail(Exit::data, "[checkpoint] {}: cannot be listed: {}", folder.string(), error.message());
  std::sort(updates.begin(), updates.end());
  return updates;
}

void remove_old_checkpoints(const fs::path& run, std::int64_t newest, std::int64_t keep,
                            const std::vector<std::int64_t>& keep_updates) {
  std::vector<std::int64_t> updates = list_checkpoints(run);
  std::erase_if(updates, [&](std::int64_t u) {
    return u > newest || std::find(keep_updates.begin(), keep_updates.end(), u) != keep_updates.end();
  });
  std::error_code error;  // what cannot be removed does no harm
  for (std::size_t i = 0; i + static_cast<std::size_t>(keep) < updates.size(); ++i) {
    // Renamed first, so that a directory under a checkpoint's name is never a part of one.
    const fs::path path = checkpoint_path(run, updates[i]);
    const fs::path dying = unfinished_path(path);
    fs::rename(path, dying, error);
    if (!error) fs::remove_all(dying, error);
  }
  std::vector<fs::path> unfinished;
  for (const auto& entry : fs::directory_iterator(run / "checkpoints", error))
    if (entry.path().extension() == ".unfinished") unfinished.push_back(entry.path());
  for (const fs::path& path : unfinished) fs::remove_all(path, error);
}

ordered_json read_checkpoint_state(const fs::path& checkpoint) {
  const fs::path path = checkpoint / "state.json";
  ordered_json state = parse_json(read_text("checkpoint", path));
  if (!state.is_object()) fail(Exit::data, "[checkpoint] {}: not a JSON object (truncated?)", path.string());
  try {
    const std::string said_digest = state.at("xxh128").get<std::string>();
    state.erase("xxh128");
    if (said_digest != digest_of(state)) fail(Exit::data, "[checkpoint] {}: changed since written", path.string());
    if (state.at("format") != state_format)
      fail(Exit::data, "[checkpoint] {}: format {}, this program reads {}", path.string(),
           fields::shown(state.at("format")), state_format);
    for (const char* name : {model_file, optimizer_file}) {
      const ordered_json &said = state.at("files").at(name), held = describe_file(checkpoint / name);
      if (said != held)
        fail(Exit::data, "[checkpoint] {}: {}, written as {} (corrupt?)", (checkpoint / name).string(), held.dump(),
             fields::shown(said));
    }
    state.at("config").at("model");
    for (const char* role : {"train", "validation"}) check_kind(path, state.at("dataset").at(role).is_array(), role);
    const ordered_json& running = state.at("running");
    check_kind(path, is_count(state.at("update")), "update");
    check_kind(path, running.at("loss_sum").is_number(), "loss_sum");
    for (const char* count : {"loss_count", "clipped_count"}) check_kind(path, is_count(running.at(count)), count);
  } catch (const nlohmann::json::exception& e) {
    fail(Exit::data, "[checkpoint] {}: not a checkpoint's state: {}", path.string(), e.what());
  }
  return state;
}

std::optional<Checkpoint> newest_checkpoint_of(const fs::path& run) {
  const auto updates = list_checkpoints(run);
  for (auto update = updates.rbegin(); update != updates.rend(); ++update) {
    const fs::path path = checkpoint_path(run, *update);
    if (access(path.c_str(), R_OK | X_OK) != 0)  // perhaps whole: not to be trained over
      fail(Exit::data, "[checkpoint] {}: cannot be read: {}", path.string(), std::strerror(errno));
    try {
      return Checkpoint{path, read_checkpoint_state(path)};
    } catch (const Error& e) {
      log_warning(fmt::format("{}; skipped", e.what()));
    }
  }
  if (!updates.empty())
    fail(Exit::data, "[checkpoint] {}: none of its {} checkpoints is whole", run.string(), updates.size());
  return std::nullopt;
}

Checkpoint find_checkpoint(const fs::path& path) {
  if (fs::exists(path / "state.json")) return {path, read_checkpoint_state(path)};
  if (auto newest = newest_checkpoint_of(path)) return *std::move(newest);
  fail(Exit::data, "[checkpoint] {}: neither a checkpoint's directory nor a run with one", path.string());
}

RunState run_state(const ordered_json& state) {
  const ordered_json& running = state.at("running");
  return {.update = state.at("update").get<std::int64_t>(),
          .loss_sum = running.at("loss_sum").get<double>(),
          .loss_count = running.at("loss_count").get<std::int64_t>(),
          .clipped_count = running.at("clipped_count").get<std::int64_t>()};
}

RunState load_checkpoint(const fs::path& checkpoint, const ordered_json& state, Backend& be, const Config& config,
                         const Training& t) {
  read_tensors(checkpoint / model_file, be, model_tensors(t));
  read_tensors(checkpoint / optimizer_file, be, optimizer_tensors(t, config));
  copy(be, t.weights, t.master);
  return run_state(state);
}

}  // namespace rownorm
