// The input is a config's text; what follows "\n--set " in it, any number of times, are overrides.
#include "train/config.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "reader.h"

namespace rownorm::fuzz {

Exit refusal() { return Exit::usage; }

void read(std::span<const std::byte> input) {
  static const std::string separator = "\n--set ";
  std::string text = text_of(input);
  std::vector<std::string> overrides;
  for (std::size_t at; (at = text.rfind(separator)) != text.npos; text.resize(at))
    overrides.insert(overrides.begin(), text.substr(at + separator.size()));
  const std::int64_t ranks = 1 + static_cast<std::int64_t>(input.size() % 2);

  const Config config = parse_config(text, "m.json", overrides, ranks);
  const auto written = to_json(config);
  require(to_json(parse_config(written.dump(), "again.json", {}, ranks)).dump() == written.dump(), "no fixed point");
  require(differences_on_resume(written, written).empty(), "differs from itself");
  require(0 <= config.warmup() && config.warmup() < config.updates(), "warmup");
  require(1 <= config.last_update() && config.last_update() <= config.updates(), "last update");
  require(config.tokens_per_update() >= 1 && parameter_count(config.model) >= 1, "sizes");
  require(config.panel_positions() >= 0 && config.panel_positions() <= config.evaluation.tokens, "panel");
  require(std::isfinite(flops_per_token(config.model)), "FLOPs");
}

std::string repaired(std::string input) { return input; }

}  // namespace rownorm::fuzz
