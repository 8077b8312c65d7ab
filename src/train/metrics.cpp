#include "train/metrics.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <tuple>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "train/run_directory.h"

namespace rownorm {
namespace {

using nlohmann::ordered_json;

[[noreturn]] void fail_at(const std::filesystem::path& path, std::size_t byte) {
  fail(Exit::data, "[metrics] {}: byte {}: not a record with progress/update", path.string(), byte);
}

// Calls each(record, offset behind it) for every whole line that is a record; returns the offset of
// the first one that is none.
std::optional<std::size_t> read_records(const std::filesystem::path& path,
                                        const std::function<void(const ordered_json&, std::size_t)>& each) {
  const std::string text = read_text("metrics", path);
  std::optional<std::size_t> bad;
  std::size_t begin = 0;
  for (std::size_t end = text.find('\n'); end != std::string::npos; begin = end + 1, end = text.find('\n', begin)) {
    const ordered_json record = parse_json(std::string_view(text).substr(begin, end - begin));
    if (record.is_object() && record.contains("progress/update") && is_count(record["progress/update"]))
      each(record, end + 1);
    else
      bad = bad.value_or(begin);
  }
  return bad;
}

}  // namespace

MetricsFile::MetricsFile(const std::filesystem::path& path, std::int64_t update) : path_(path) {
  std::size_t keep = 0;
  if (std::filesystem::exists(path)) {
    const auto bad = read_records(path, [&](const ordered_json& record, std::size_t end) {
      const auto at = record["progress/update"].get<std::int64_t>();
      if (at <= update) std::tie(keep, last_update_) = std::tuple(end, at);
    });
    if (bad && *bad < keep) fail_at(path, *bad);
  }
  fd_ = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_APPEND, 0644);
  if (fd_ < 0 || ftruncate(fd_, static_cast<off_t>(keep)) != 0) {
    const int error = errno;
    if (fd_ >= 0) ::close(fd_);
    fail(Exit::data, "[metrics] {}: {}", path.string(), std::strerror(error));
  }
}

MetricsFile::~MetricsFile() {
  if (fd_ >= 0) ::close(fd_);
}

void MetricsFile::append(const ordered_json& record) {
  const std::string line = record.dump() + "\n";
  const off_t before = lseek(fd_, 0, SEEK_END);
  std::size_t done = 0;
  while (done < line.size()) {  // after a part, the rest says why
    const ssize_t written = ::write(fd_, line.data() + done, line.size() - done);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) break;
    done += static_cast<std::size_t>(written);
  }
  if (done == line.size()) return;
  const int error = errno;
  const bool taken_back = before >= 0 && ftruncate(fd_, before) == 0;  // else resuming cuts the unfinished line off
  fail(Exit::data, "[metrics] {}: {}{}", path_.string(), std::strerror(error),
       taken_back ? "" : " (the last line is unfinished)");
}

void MetricsFile::sync() {
  if (fsync(fd_) != 0) fail(Exit::data, "[metrics] {}: {}", path_.string(), std::strerror(errno));
}

ordered_json latest_metrics(const std::filesystem::path& path) {
  ordered_json latest = ordered_json::object();
  const auto bad = read_records(path, [&](const ordered_json& record, std::size_t) { latest.update(record); });
  if (bad) fail_at(path, *bad);
  return latest;
}

}  // namespace rownorm
