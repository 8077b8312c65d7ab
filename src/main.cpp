#include <fcntl.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <iostream>

#include "base/error.h"
#include "base/file.h"
#include "cmd/commands.h"
#include "train/log.h"
#include "train/run_directory.h"

namespace {

using namespace rownorm;

// CLI11 alone takes a number beyond the type's range for the nearest one in it.
CLI::Validator integer(std::uint64_t low, std::uint64_t high) {
  return {[=](const std::string& text) {
            std::uint64_t value = 0;
            const char* end = text.data() + text.size();
            const auto [stop, error] = std::from_chars(text.data(), end, value);
            if (error == std::errc() && stop == end && low <= value && value <= high) return std::string();
            return fmt::format("\"{}\" must be an integer from {} to {}", text, low, high);
          },
          "INTEGER"};
}

// A shell's variable that is not set must not choose what holds without the option.
const CLI::Validator not_empty([](const std::string& text) { return std::string(text.empty() ? "is empty" : ""); }, "");

int run(int argc, char** argv) {
  CLI::App app{"Trains GPTs to study the update geometry of the language-model head."};
  app.set_version_flag("--version", version_line());
  app.require_subcommand(0, 1);  // none is reported below, after what is there instead
  int exit_code = 0;
  constexpr std::uint64_t most = INT64_MAX;

  TrainOptions train;
  CLI::App* sub = app.add_subcommand("train", "train a model from a config");
  sub->add_option("config", train.config, "JSON file")->required();
  sub->add_option("--set", train.overrides, "path=value: override a key of the config, e.g. optimizer.head.lr=2e-3")
      ->type_name("PATH=VALUE")
      ->allow_extra_args(false);
  sub->add_flag("--resume", train.resume, "continue from the newest whole checkpoint of the output, if there is one");
  sub->add_flag("--dry-run", train.dry_run, "check the config and print the plan; opens no data and no device");
  sub->callback([&] { exit_code = train_command(train); });

  EvalOptions eval;
  sub = app.add_subcommand("eval", "loss and perplexity of a checkpoint on shards");
  sub->add_option("checkpoint", eval.checkpoint, "a checkpoint's or a run's directory")->required();
  sub->add_option("--data", eval.data, "shards (pattern); default: the run's validation data")->check(not_empty);
  sub->add_option("--tokens", eval.tokens, "how many, from the start; 0: all (default: as in training; all of --data)")
      ->check(integer(0, most));
  sub->add_option("--micro-batch", eval.micro_batch, "sequences at a time")->check(integer(1, most));
  sub->add_option("--device", eval.device, "auto, cpu, cuda, reference");
  sub->add_option("--precision", eval.precision, "auto, bf16, tf32, fp32, fp64");
  sub->callback([&] { exit_code = as_one_process("eval", [&] { return eval_command(eval); }); });

  SampleOptions sample;
  sub = app.add_subcommand("sample", "text from a checkpoint's model");
  sub->add_option("checkpoint", sample.checkpoint, "a checkpoint's or a run's directory")->required();
  sub->add_option("--prompt", sample.prompt, "text to continue (default: the token before every document)");
  sub->add_option("--prompt-file", sample.prompt_file, "the same from a file; -: standard input");
  sub->add_option("--prompt-tokens", sample.prompt_tokens, "the same as token ids: 17,4,0");
  sub->add_option("--tokens", sample.tokens, "how many to generate (default: up to the model's context)")
      ->check(integer(1, most));
  sub->add_option("--samples", sample.samples, "how many continuations, each from its own stream of the seed")
      ->check(integer(1, most));
  sub->add_option("--temperature", sample.sampling.temperature, "divides the logits; 0: the most likely token");
  sub->add_option("--top-k", sample.sampling.top_k, "only the k most likely tokens; 0: all")->check(integer(0, most));
  sub->add_option("--top-p", sample.sampling.top_p, "only the most likely tokens that together have probability p");
  sub->add_option("--seed", sample.seed, "same seed, same text")->check(integer(0, UINT64_MAX));
  sub->add_option("--stop", sample.stop, "end at this token")->type_name("TOKEN");
  sub->add_option("--tokenizer", sample.tokenizer,
                  "bytes, a tokenizer.json, or none: token ids (default: bytes for 256 tokens, else the tokenizer.json "
                  "beside the run's data)");
  sub->add_flag("--json", sample.json, "one JSON object a sample, with its tokens");
  sub->add_option("--device", sample.device, "auto, cpu, cuda, reference");
  sub->add_option("--precision", sample.precision, "auto, bf16, tf32, fp32, fp64");
  sub->callback([&] { exit_code = as_one_process("sample", [&] { return sample_command(sample); }); });

  ExportOptions exported;
  sub = app.add_subcommand("export", "a checkpoint's model as a folder that other programs read");
  sub->add_option("checkpoint", exported.checkpoint, "a checkpoint's or a run's directory")->required();
  sub->add_option("--output", exported.output, "the folder to write, not there yet")->required()->type_name("DIR");
  sub->add_option("--format", exported.format, "hf: of Hugging Face's transformers, Qwen3ForCausalLM (default)")
      ->check(CLI::IsMember({"hf"}));
  sub->add_option("--dtype", exported.dtype, "of the weights: f32 (default) or bf16")
      ->check(CLI::IsMember({"f32", "bf16"}));
  sub->add_option("--tokenizer", exported.tokenizer,
                  "a tokenizer.json to put beside it, or none (default: the one beside the run's data)");
  sub->callback([&] { exit_code = as_one_process("export", [&] { return export_command(exported); }); });

  InspectOptions inspect;
  sub = app.add_subcommand("inspect", "what a shard, safetensors file, checkpoint or run holds, as JSON");
  sub->add_option("path", inspect.path, "file, glob of shards, or directory")->required();
  sub->add_option("--diameter", inspect.diameter, "exact row diameter of this tensor")
      ->type_name("NAME")
      ->check(not_empty);
  sub->callback([&] { exit_code = as_one_process("inspect", [&] { return inspect_command(inspect); }); });

  BenchOptions bench;
  sub = app.add_subcommand("bench",
                           "where an update's time goes, against the machine's bounds; reads and writes no data");
  sub->add_option("config,--config", bench.config, "JSON file")->required();
  sub->add_option("--set", bench.overrides, "path=value: override a key of the config, e.g. batch.micro_batch=4")
      ->type_name("PATH=VALUE")
      ->allow_extra_args(false);
  sub->add_option("--updates", bench.updates, "how many to measure (default 20)")->check(integer(1, 10000));
  sub->add_option("--device", bench.device, "auto, cpu, cuda, reference (default: the config's)")->check(not_empty);
  sub->add_flag("--json", bench.json, "JSON instead of tables");
  sub->callback([&] { exit_code = as_one_process("bench", [&] { return bench_command(bench); }); });

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() != 0) return usage_error(fmt::format("[usage] {} (rownorm --help)", e.what()));
    app.exit(e);  // --help, --version
    if (!std::cout.flush()) fail(Exit::data, "[output] standard output: cannot be written");
    return static_cast<int>(Exit::ok);
  }
  if (app.get_subcommands().empty())
    return usage_error("[usage] no subcommand: train, eval, sample, export, inspect or bench (rownorm --help)");
  if (std::fflush(stdout) != 0) fail(Exit::data, "[output] standard output: {}", std::strerror(errno));
  return exit_code;
}

}  // namespace

int main(int argc, char** argv) {
  // A file opened later must not become standard output by taking its free number.
  for (int fd = 0; fd <= 2; ++fd)
    if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) < 0) return static_cast<int>(Exit::data);
  std::signal(SIGXFSZ, SIG_IGN);  // a file size limit is an error of write(), not a death
  std::signal(SIGPIPE, SIG_IGN);
  report_shortened_mappings();
  start_log();
  try {
    return run(argc, argv);
  } catch (...) {
    const Error error = current_error();
    log_error(error.what());
    return static_cast<int>(error.code());
  }
}
