// A run's directory: its lock, its provenance and the identity of the data it used.
#pragma once
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "comm/comm.h"
#include "data/shards.h"
#include "ops/backend.h"
#include "train/config.h"

namespace rownorm {

// Holds the directory's lock (flock) until destroyed. Error (exit 3): not a directory, not creatable or writable, in
// use by another process.
class RunDirectory {
 public:
  static RunDirectory create(const std::filesystem::path& path);  // must not exist yet; parents are made
  static RunDirectory open(const std::filesystem::path& path);    // must be an empty directory or one made by a run
  ~RunDirectory();
  RunDirectory(RunDirectory&& other) noexcept : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)) {}
  RunDirectory(const RunDirectory&) = delete;
  RunDirectory& operator=(const RunDirectory&) = delete;

  const std::filesystem::path& path() const { return path_; }
  void write(const std::string& name, const nlohmann::ordered_json& document) const;  // atomically

 private:
  RunDirectory(std::filesystem::path path, int fd) : path_(std::move(path)), fd_(fd) {}
  static RunDirectory lock(const std::filesystem::path& path);
  std::filesystem::path path_;
  int fd_ = -1;
};

// Names, sizes and header digests of the shards: equal for equal data wherever it lies.
nlohmann::ordered_json fingerprint(const ShardSet& train, const ShardSet& validation);
// The first shard in which two fingerprints differ, "" if they are equal; `a_where` and `b_where` tell them apart
// ("at the checkpoint", "now").
std::string difference(const nlohmann::ordered_json& a, const std::string& a_where, const nlohmann::ordered_json& b,
                       const std::string& b_where);

// run.json: program, machine, data, and one entry a session in "sessions" with its start, end and outcome.
class Provenance {
 public:
  // Continues the directory's run.json if it has one.
  Provenance(const RunDirectory& directory, const Config& config, const Backend& be, const Comm& comm,
             const nlohmann::ordered_json& dataset, std::int64_t first_update);
  void finish(std::int64_t last_update, const std::string& outcome);  // "finished", "stopped by SIGTERM", ...

 private:
  const RunDirectory& directory_;
  nlohmann::ordered_json document_;
};

std::string version_line();  // "rownorm 0.1.0 (commit abc123, g++ 12.2.0, Release)"

}  // namespace rownorm
