// metrics.jsonl: one JSON record a line, one record an update, numbers that read back exactly.
#pragma once
#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace rownorm {

class MetricsFile {
 public:
  // Opens (or creates) the file, cutting off an unfinished last line and every record of an update after `update`
  // (-1: all records). Error (exit 3) on failure or a line that is no record.
  MetricsFile(const std::filesystem::path& path, std::int64_t update);
  ~MetricsFile();
  MetricsFile(const MetricsFile&) = delete;
  MetricsFile& operator=(const MetricsFile&) = delete;

  void append(const nlohmann::ordered_json& record);  // one write; a failed one is taken back
  void sync();                                        // to disk, before the checkpoint that relies on it

 private:
  std::filesystem::path path_;
  int fd_ = -1;
};

// The latest value of every key, over all records.
nlohmann::ordered_json latest_metrics(const std::filesystem::path& path);

}  // namespace rownorm
