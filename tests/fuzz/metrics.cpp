// metrics.jsonl: read for `inspect`, and cut off behind an update for `train --resume`.
#include "train/metrics.h"

#include <fstream>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "base/json.h"
#include "base/temporary_folder.h"
#include "reader.h"
#include "train/run_directory.h"

namespace rownorm::fuzz {

Exit refusal() { return Exit::data; }

void read(std::span<const std::byte> input) {
  static const TemporaryFolder folder;
  const auto path = folder / "metrics.jsonl";
  const std::string text = text_of(input);
  for (const std::int64_t update : {std::int64_t{-1}, std::int64_t{7}, std::int64_t{INT64_MAX}}) {
    std::ofstream(path, std::ios::binary) << text;
    const std::int64_t last = MetricsFile(path, update).last_update();
    const std::string kept = read_text("metrics", path);
    require(last <= update && text.starts_with(kept) && (kept.empty() || kept.ends_with('\n')), "another end");
    latest_metrics(path);  // what is kept is whole
    MetricsFile again(path, update);
    require(again.last_update() == last && read_text("metrics", path) == kept, "no fixed point");
    again.append({{"progress/update", 8}});
    require(latest_metrics(path)["progress/update"] == 8, "not appended");
  }
  std::ofstream(path, std::ios::binary) << text;
  require(!json_text(latest_metrics(path), 2).empty(), "no text");
}

std::string repaired(std::string input) { return input; }

}  // namespace rownorm::fuzz
