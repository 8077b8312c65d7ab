#include "train/run_directory.h"

#include <fcntl.h>
#include <fmt/chrono.h>
#include <rownorm_version.h>  // made by the build
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <limits>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"

namespace rownorm {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

std::string utc_now() { return fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::chrono::system_clock::now())); }

ordered_json shards_of(const ShardSet& set) {
  ordered_json list = ordered_json::array();
  for (const ShardInfo& s : set.shards())
    list.push_back(
        {{"name", s.name()}, {"bytes", shard_header_bytes + 2 * s.tokens}, {"header_xxh128", s.header_digest}});
  return list;
}

}  // namespace

RunDirectory RunDirectory::create(const fs::path& path) {
  std::error_code error;
  if (path.has_parent_path()) fs::create_directories(path.parent_path(), error);
  if (error) fail(Exit::data, "[output] {}: cannot be created: {}", path.string(), error.message());
  const bool created = fs::create_directory(path, error);
  if (created) sync_directory(path.has_parent_path() ? path.parent_path() : ".");
  if (!created) {
    if (error) fail(Exit::data, "[output] {}: cannot be created: {}", path.string(), error.message());
    fail(Exit::data, "[output] {}: has just been made by another run; name another output", path.string());
  }
  return lock(path);
}

RunDirectory RunDirectory::open(const fs::path& path) {
  std::error_code error;
  if (!fs::is_directory(path, error)) fail(Exit::data, "[output] {}: not a directory", path.string());
  // A run that was killed before its config.json was whole leaves at most the part of it.
  const auto foreign = [](const fs::directory_entry& entry) { return entry.path().extension() != ".partial"; };
  if (!fs::exists(path / "config.json", error) &&
      std::any_of(fs::directory_iterator(path), fs::directory_iterator(), foreign))
    fail(Exit::data, "[output] {}: not a run's directory (no config.json in it); name another output", path.string());
  return lock(path);
}

RunDirectory RunDirectory::lock(const fs::path& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) fail(Exit::data, "[output] {}: {}", path.string(), std::strerror(errno));
  RunDirectory directory(path, fd);
  if (flock(fd, LOCK_EX | LOCK_NB) != 0)
    fail(Exit::data, "[output] {}: {}", path.string(),
         errno == EWOULDBLOCK ? "in use by another run" : std::strerror(errno));
  if (access(path.c_str(), W_OK) != 0) fail(Exit::data, "[output] {}: {}", path.string(), std::strerror(errno));
  return directory;
}

RunDirectory::~RunDirectory() {
  if (fd_ >= 0) ::close(fd_);
}

void RunDirectory::write(const std::string& name, const ordered_json& document) const {
  write_text_atomically(path_ / name, json_text(document, 2) + "\n");
}

ordered_json fingerprint(const ShardSet& train, const ShardSet& validation) {
  return {{"train", shards_of(train)}, {"validation", shards_of(validation)}};
}

std::string difference(const ordered_json& a, const std::string& a_where, const ordered_json& b,
                       const std::string& b_where) {
  for (const char* role : {"train", "validation"}) {
    const ordered_json &list_a = a.at(role), &list_b = b.at(role);
    for (std::size_t i = 0; i < std::max(list_a.size(), list_b.size()); ++i) {
      const std::string in_a = i < list_a.size() ? json_text(list_a[i]) : "nothing",
                        in_b = i < list_b.size() ? json_text(list_b[i]) : "nothing";
      if (in_a != in_b) return fmt::format("{} shard {}: {} {}, {} {}", role, i, in_a, a_where, in_b, b_where);
    }
  }
  return "";
}

std::string version_line() {
  return fmt::format("rownorm {} (commit {}, {} {}, {})", ROWNORM_VERSION, ROWNORM_COMMIT, ROWNORM_COMPILER,
                     __VERSION__, ROWNORM_BUILD_TYPE);
}

Provenance::Provenance(const RunDirectory& directory, const Config& config, const Backend& be, const Comm& comm,
                       const ordered_json& dataset, std::int64_t first_update)
    : directory_(directory) {
  const fs::path path = directory.path() / "run.json";
  ordered_json sessions = ordered_json::array();
  if (fs::exists(path)) {
    const ordered_json before = parse_json(read_text("run", path));
    if (before.is_object() && before.contains("sessions") && before["sessions"].is_array())
      sessions = before["sessions"];
  }
  sessions.push_back({{"program", version_line()},
                      {"device", be.description()},
                      {"ranks", comm.size()},
                      {"exchange", comm.description()},
                      {"first_update", first_update},
                      {"start", utc_now()},
                      {"end", nullptr},
                      {"last_update", nullptr},
                      {"outcome", "running"}});
  document_ = {{"name", config.name},         {"version", ROWNORM_VERSION},
               {"commit", ROWNORM_COMMIT},    {"parameters", parameter_count(config.model)},
               {"updates", config.updates()}, {"tokens_per_update", config.tokens_per_update()},
               {"dataset", dataset},          {"sessions", sessions}};
  directory_.write("run.json", document_);
}

void Provenance::finish(std::int64_t last_update, const std::string& outcome) {
  ordered_json& session = document_["sessions"].back();
  session["end"] = utc_now();
  session["last_update"] = last_update;
  session["outcome"] = outcome;
  directory_.write("run.json", document_);
}

}  // namespace rownorm
