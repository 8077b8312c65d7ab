// rownorm train --dry-run: what the run would need.
#include "base/error.h"
#include "cmd/commands.h"
#include "data/shards.h"
#include "ops/cuda_plan.h"
#include "ops/open.h"
#include "train/batch_reader.h"
#include "train/config.h"
#include "train/training.h"

namespace rownorm {

void print_plan(const Config& config, int ranks) {
  // CUDA is planned for without a device; the others are opened: they are ordinary code.
  const std::string device = config.device != "auto" ? config.device : only_cuda_has(config) ? "cuda" : "cpu";
  const bool cuda = device == "cuda";
  const auto be = cuda ? nullptr : open_backend(device, config.precision);
  const DType master = cuda ? DType::f32 : be->master_dtype();
  const DType compute = cuda ? cuda::compute_dtype_of(config.precision) : be->compute_dtype();
  const WorkspaceSizes sizes = workspace_sizes(config);

  Arena plan;
  make_training(plan, config, compute, master,
                cuda ? cuda::workspace_bytes(compute, sizes) : be->workspace_bytes(sizes), 0, ranks);
  const std::int64_t parameters = parameter_count(config.model);
  const auto line = [](const char* what, const std::string& value) { fmt::print("{:<22} {}\n", what, value); };
  line("name", config.name);
  line("device", config.device == "auto" ? fmt::format("auto (planned for {})", device) : device);
  if (ranks > 1) line("ranks", fmt::format("{} (memory: of rank 0)", ranks));
  line("parameters", fmt::format("{}", parameters));
  line("FLOPs a token", fmt::format("{:.0f}", flops_per_token(config.model)));
  line("tokens an update", fmt::format("{}", config.tokens_per_update()));
  line("updates", config.last_update() < config.updates()
                      ? fmt::format("{} of {} (max_updates)", config.last_update(), config.updates())
                      : fmt::format("{}", config.updates()));
  line("warmup updates", fmt::format("{}", config.warmup()));
  line("training tokens", fmt::format("{}", config.last_update() * config.tokens_per_update()));
  line("tokens a parameter", fmt::format("{:.3f}", static_cast<double>(config.updates() * config.tokens_per_update()) /
                                                       static_cast<double>(parameters)));
  line("training FLOPs",
       fmt::format("{:.4g}", flops_per_token(config.model) *
                                 static_cast<double>(config.last_update() * config.tokens_per_update())));
  for (const auto& [purpose, bytes] : plan.by_purpose()) line(("memory: " + purpose).c_str(), human_bytes(bytes));
  line("memory: total", fmt::format("{} ({} bytes)", human_bytes(plan.bytes()), plan.bytes()));
  if (cuda)
    line("pinned host memory", human_bytes(cuda::staging_bytes + BatchReader::slots * BatchReader::slot_bytes(config)));
  for (const auto& [what, pattern] : {std::pair{"train", config.data.train}, {"validation", config.data.validation}}) {
    try {
      line(fmt::format("data: {}", what).c_str(), fmt::format("{} shards", expand_pattern(pattern).size()));
    } catch (const Error& e) {
      line(fmt::format("data: {}", what).c_str(), fmt::format("note: {}", e.what()));
    }
  }
}

}  // namespace rownorm
