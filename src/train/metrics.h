// metrics.jsonl: one JSON record a line, one record an update, numbers that read back exactly.
#pragma once
#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace rownorm {

class MetricsFile {
 public:
  // Opens (or creates) the file, cutting off what stands behind the last record of an update <= `update` (-1: all).
  // Error (exit 3) on failure or a line before that record that is none.
  MetricsFile(const std::filesystem::path& path, std::int64_t update);
  std::int64_t last_update() const { return last_update_; }  // of the records kept; -1 for none
  ~MetricsFile();
  MetricsFile(const MetricsFile&) = delete;
  MetricsFile& operator=(const MetricsFile&) = delete;

  void append(const nlohmann::ordered_json& record);  // one write; a failed one is taken back
  void sync();                                        // to disk, before the checkpoint that relies on it

 private:
  std::filesystem::path path_;
  int fd_ = -1;
  std::int64_t last_update_ = -1;
};

// The latest value of every key, over all records.
nlohmann::ordered_json latest_metrics(const std::filesystem::path& path);

}  // namespace rownorm
