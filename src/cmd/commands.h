// The subcommands. Each returns the process's exit code or throws an Error.
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "model/sampling.h"

namespace rownorm {

class Comm;
struct Config;

// Runs a command's body on each rank that the launcher started, if it started several. An error that all ranks know of
// is reported once; any other ends them all.
int on_every_rank(const std::string& command, const std::function<int(Comm&)>& body);
// Of a command that knows one process only: exit 2 on several ranks.
int as_one_process(const std::string& command, const std::function<int()>& body);
// A wrong command line: exit 2 with this line.
int usage_error(const std::string& message);

struct TrainOptions {
  std::filesystem::path config;
  std::vector<std::string> overrides;  // "path=value"
  bool resume = false, dry_run = false;
};
int train_command(const TrainOptions& options);
void print_plan(const Config& config, int ranks);  // --dry-run: opens no data and no device

struct EvalOptions {
  std::filesystem::path checkpoint;    // a checkpoint's or a run's directory
  std::string data;                    // pattern; empty: the run's own validation data
  std::optional<std::int64_t> tokens;  // none: the run's evaluation.tokens, or with `data` all; 0: all
  std::int64_t micro_batch = 0;        // sequences at a time; 0: the run's
  std::string device = "auto", precision = "auto";
};
int eval_command(const EvalOptions& options);

struct SampleOptions {
  std::filesystem::path checkpoint;  // a checkpoint's or a run's directory
  // At most one; none, or an empty text: the token that separates documents.
  std::optional<std::string> prompt;         // text
  std::optional<std::string> prompt_file;    // a file of text; "-": standard input
  std::optional<std::string> prompt_tokens;  // "17,4,0"
  std::optional<std::int64_t> tokens;        // how many to generate; none: up to the context
  std::int64_t samples = 1;
  Sampling sampling;
  std::uint64_t seed = 0;
  std::optional<std::string> stop;  // a token that ends a sample and is not shown
  std::string tokenizer = "auto";   // "auto", "bytes", "none" or a tokenizer.json
  bool json = false;
  std::string device = "auto", precision = "auto";
};
int sample_command(const SampleOptions& options);

struct ExportOptions {
  std::filesystem::path checkpoint;  // a checkpoint's or a run's directory
  std::filesystem::path output;      // the folder to write, not there yet
  std::string format = "hf";         // the only one: a folder of Hugging Face's transformers
  std::string dtype = "f32";         // of the weights: "f32" or "bf16"
  std::string tokenizer = "auto";    // "auto": the one beside the run's data, if there is one; "none" or a file
};
int export_command(const ExportOptions& options);

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
