// The whole run as one JSON file (the contract is README, "Configuration").
#pragma once
#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "geometry/hilbert.h"
#include "model/config.h"
#include "model/transformer.h"
#include "optim/config.h"

namespace rownorm {

struct Config {
  std::string name;
  std::uint64_t seed = 0;
  std::string device = "auto", precision = "auto";
  Recompute recompute = Recompute::none;
  ModelConfig model;
  struct {
    std::string train, validation;
  } data;
  struct {
    std::int64_t sequences = 0, micro_batch = 0;
  } batch;
  struct {
    std::optional<double> tokens_per_parameter;  // exactly one of these two
    std::optional<std::int64_t> updates;
    std::optional<double> warmup_fraction;  // exactly one of these two
    std::optional<std::int64_t> warmup_updates;
    double min_lr_ratio = 0.1;
    std::optional<std::int64_t> max_updates;
  } schedule;
  double clip_norm = 1.0;
  OptimizerConfigs optimizer;
  struct {
    std::int64_t every = 500, tokens = 0;
    bool at_start = false;
  } evaluation;
  struct {
    std::int64_t diameter_every = 10;
    std::vector<PositionRange> hilbert_panel;  // disjoint
  } diagnostics;
  std::int64_t log_every = 10;
  std::optional<double> peak_tflops;  // of one rank's device
  struct {
    std::int64_t every = 1000, keep = 2;
    std::vector<std::int64_t> keep_updates;
  } checkpoint;
  struct {
    double timeout_seconds = 600;
  } comm;
  struct {
    bool compare_ranks = false;
  } debug;
  std::optional<std::string> init_from;
  std::string output;

  // What follows from the above.
  std::int64_t tokens_per_update() const { return batch.sequences * model.context; }
  std::int64_t updates() const;      // T of the schedule: floor(tokens_per_parameter * parameters / tokens_per_update)
  std::int64_t warmup() const;       // floor(warmup_fraction * T)
  std::int64_t last_update() const;  // min(T, max_updates)
  std::int64_t panel_positions() const;  // N of the Hilbert panel
};

// Reads a config file, applies `--set path=value` overrides in order, checks everything that needs no other file.
// `ranks` is the number of processes that share a batch. Every error is an Error (exit 2; a missing or unreadable file
// exit 3) that names the file or --set, the full path of the key, the value and what is allowed.
Config load_config(const std::filesystem::path& path, const std::vector<std::string>& overrides,
                   std::int64_t ranks = 1);

// The same from text (`where` names it in messages): what load_config does after reading the file.
Config parse_config(const std::string& text, const std::string& where, const std::vector<std::string>& overrides,
                    std::int64_t ranks = 1);

// Whether only CUDA has the precisions that it asks for, with device "auto" too.
bool only_cuda_has(const Config& config);

// exit 2 where the backend that "auto" became lacks a newton_schulz_precision. (Of other devices load_config has seen.)
void check_newton_schulz(const Config& config, const Backend& be);

// The resolved config: every key written, one of each alternative pair; itself a valid config that reads back equal.
nlohmann::ordered_json to_json(const Config& config);

// Full paths of the keys in which two resolved configs differ, leaving out those that may differ on resume (device,
// precision, recompute, batch.micro_batch, schedule.max_updates, log_every, checkpoint.*, comm.*, debug.*, name,
// output, peak_tflops, optimizer.*.newton_schulz_precision, data.*); data is compared by the caller. One line a key:
// "optimizer.head.lr: 0.0032 in the checkpoint, 0.004 now".
std::vector<std::string> differences_on_resume(const nlohmann::ordered_json& checkpoint,
                                               const nlohmann::ordered_json& now);

}  // namespace rownorm
