// The subcommands. Each returns the process's exit code or throws an Error.
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace rownorm {

class Comm;

// Runs a command's body on each rank that the launcher started, if it started several. An error that all ranks know of
// is reported once; any other ends them all.
int on_every_rank(const std::function<int(Comm&)>& body);
// Of a command that knows one process only: exit 2 on several ranks.
int as_one_process(const char* command, const std::function<int()>& body);

struct TrainOptions {
  std::filesystem::path config;
  std::vector<std::string> overrides;  // "path=value"
  bool resume = false, dry_run = false;
};
int train_command(const TrainOptions& options);

struct EvalOptions {
  std::filesystem::path checkpoint;    // a checkpoint's or a run's directory
  std::string data;                    // pattern; empty: the run's own validation data
  std::optional<std::int64_t> tokens;  // none: the run's evaluation.tokens, or with `data` all; 0: all
  std::int64_t micro_batch = 0;        // sequences at a time; 0: the run's
  std::string device = "auto", precision = "auto";
};
int eval_command(const EvalOptions& options);

struct InspectOptions {
  std::string path;      // a shard, a glob, a safetensors file, a checkpoint's or a run's directory
  std::string diameter;  // name of a tensor whose exact row diameter is wanted
};
int inspect_command(const InspectOptions& options);

struct BenchOptions {
  std::filesystem::path config;
  std::vector<std::string> overrides;  // "path=value"
  std::string device;                  // instead of the config's; empty: the config's
  std::int64_t updates = 20;           // that are measured
  bool json = false;
};
int bench_command(const BenchOptions& options);

}  // namespace rownorm
