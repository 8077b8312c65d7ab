// rownorm train: the run from its config to its last checkpoint.
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstring>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "cmd/commands.h"
#include "comm/comm.h"
#include "data/batches.h"
#include "geometry/diameter.h"
#include "ops/open.h"
#include "optim/schedule.h"
#include "train/batch_reader.h"
#include "train/checkpoint.h"
#include "train/config.h"
#include "train/log.h"
#include "train/metrics.h"
#include "train/numbers.h"
#include "train/run_directory.h"
#include "train/signals.h"
#include "train/step.h"
#include "train/training.h"
#include "train/validation.h"

namespace rownorm {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

struct Run {
  explicit Run(Comm& ranks) : comm(&ranks) {}
  Comm* comm;  // from the host's ranks to those of devices
  Config config;
  std::unique_ptr<Backend> be;
  std::unique_ptr<ShardSet> train, validation;
  std::optional<TrainingOrder> order;
  std::optional<ValidationSet> validation_set;
  ordered_json dataset;
  Memory memory;
  std::int64_t planned_bytes = 0;
  Training t;
  RunState state;
  std::int64_t saved = 0;   // update of the newest checkpoint
  std::int64_t recent = 0;  // updates on the device that the host has not looked at
  // How many ranks were asked to stop, copied from the device behind update u into element u % 2.
  Memory asked;  // (2) f64 of the host
  std::array<std::optional<Backend::Ticket>, 2> asked_copied;

  // What is written: by rank 0 alone, empty elsewhere.
  std::optional<RunDirectory> directory;
  std::optional<MetricsFile> metrics;
  std::optional<Provenance> provenance;
  bool writes() const { return comm->rank() == 0; }

  std::optional<BatchReader> batches;  // uses much of the above
  // Last: it goes before what its exchange may still read, and before whatever waits for the device, which after an
  // error may wait for an exchange that the other ranks never come to.
  std::unique_ptr<Comm> devices;
};

// Reads the batches of these updates from now on.
void read_batches(Run& run, std::int64_t first, std::int64_t last) {
  run.batches.emplace(*run.be, *run.train, *run.order, run.config, run.comm->rank(), run.comm->size(), first, last);
}

// All ranks must have been started alike: the first key, at any depth, in which rank 0's document and another's differ,
// "" for none.
std::string first_difference(Comm& comm, const ordered_json& document) {
  const auto texts = comm.all_gather(json_text(document));
  const auto flat = [](const std::string& text) { return ordered_json::parse(text).flatten(); };
  const ordered_json ours = flat(texts[0]);
  for (std::size_t r = 1; r < texts.size(); ++r) {
    if (texts[r] == texts[0]) continue;
    const ordered_json theirs = flat(texts[r]);
    for (const ordered_json* keys : {&ours, &theirs})
      for (const auto& entry : keys->items()) {
        const auto value = [&](const ordered_json& j) {
          return j.contains(entry.key()) ? j[entry.key()].dump() : std::string("nothing");
        };
        if (value(ours) == value(theirs)) continue;
        std::string path = entry.key().substr(1);
        std::ranges::replace(path, '/', '.');
        return fmt::format("{}: {} on rank 0, {} on rank {}", path, value(ours), value(theirs), r);
      }
  }
  return "";
}

// The same of the shards, which are many: first by a digest.
std::string first_shard_difference(Comm& comm, const ordered_json& dataset) {
  const std::string text = json_text(dataset);
  const auto digests = comm.all_gather(digest(std::as_bytes(std::span(text))));
  if (std::ranges::all_of(digests, [&](const std::string& d) { return d == digests[0]; })) return "";
  const auto texts = comm.all_gather(text);
  for (std::size_t r = 1; r < texts.size(); ++r)
    if (texts[r] != texts[0])
      return difference(ordered_json::parse(texts[0]), "on rank 0", ordered_json::parse(texts[r]),
                        fmt::format("on rank {}", r));
  return "";
}

void open_data(Run& run, std::int64_t first_update) {
  const Config& c = run.config;
  run.train = std::make_unique<ShardSet>("train", c.data.train, c.model.vocab_size);
  run.validation = std::make_unique<ShardSet>("validation", c.data.validation, c.model.vocab_size);
  std::vector<std::int64_t> tokens;
  for (const ShardInfo& s : run.train->shards()) tokens.push_back(s.tokens);
  run.order.emplace(c.seed, tokens, c.model.context, c.batch.sequences);
  if (c.evaluation.every > 0 || c.evaluation.at_start)
    run.validation_set.emplace(*run.validation, c.model.context, c.evaluation.tokens / c.model.context);
  run.train->tokens_of(run.order->group(first_update).shard);  // scanned before the first update needs it
  run.dataset = fingerprint(*run.train, *run.validation);
}

// With a GPU a rank, tensors are exchanged by NCCL; those of the host by the launcher's ranks as they are.
void exchange_over_devices(Run& run) {
  Comm& ranks = *run.comm;
  const auto devices = ranks.all_gather(run.be->name());  // "auto" looks at each rank's own
  for (std::size_t r = 1; r < devices.size(); ++r)
    if (devices[r] != devices[0])
      throw AgreedError(Exit::device,
                        fmt::format("[ranks] device {}: is {} on rank 0, {} on rank {}; one GPU a rank, or "
                                    "device cpu",
                                    run.config.device, devices[0], devices[r], r));
  if (devices[0] != "cuda") return;
  run.devices = make_nccl(ranks, *run.be, run.config.comm.timeout_seconds, log_error);
  run.comm = run.devices.get();
}

void plan_memory(Run& run) {
  const Config& c = run.config;
  const WorkspaceSizes sizes = workspace_sizes(c);
  const std::int64_t workspace = run.be->workspace_bytes(sizes);
  const auto build = [&](Arena& arena) {
    return make_training(arena, c, run.be->compute_dtype(), run.be->master_dtype(), workspace, run.comm->rank(),
                         run.comm->size());
  };
  Arena plan;
  build(plan);
  run.planned_bytes = plan.bytes();
  log_line("memory: " + describe(plan));
  run.memory = allocate_plan(*run.be, plan);
  Arena arena(run.memory.get(), plan.bytes());
  run.t = build(arena);
  run.be->set_workspace(run.t.workspace, sizes);
  run.asked = run.be->allocate_host(2 * size_of(DType::f64));
  run.be->fill(run.t.control.ok, 1);
  upload_rope(*run.be, run.t.activations, c.model);
}

// The newest whole checkpoint of the output; its config must agree.
std::optional<Checkpoint> checkpoint_to_resume(const Config& config) {
  auto found = newest_checkpoint_of(config.output);
  if (!found) return found;
  const auto differences = differences_on_resume(found->state.at("config"), to_json(config));
  if (!differences.empty()) fail(Exit::usage, "[resume] {}: {}", found->path.string(), fmt::join(differences, "; "));
  return found;
}

// Looks at the updates since the last look, which are then whole on every rank: adds up losses and clipped updates,
// stops at a number that is not finite.
void look_at_recent(Run& run) {
  Backend& be = *run.be;
  wait_for_weights(*run.comm, run.t);
  std::vector<double> loss(static_cast<std::size_t>(run.recent)), norm(loss.size());
  be.download(loss.data(), run.t.recent_loss.rows(0, run.recent));
  be.download(norm.data(), run.t.recent_norm.rows(0, run.recent));
  const std::int64_t first = run.state.update - run.recent + 1;
  run.recent = 0;
  for (std::size_t i = 0; i < loss.size(); ++i) {
    if (std::isfinite(loss[i]) && std::isfinite(norm[i])) {
      run.state.loss_sum += loss[i];
      run.state.loss_count += 1;
      run.state.clipped_count += norm[i] > run.config.clip_norm ? 1 : 0;
      continue;
    }
    together(*run.comm, [&] {
      if (run.t.batch_error) throw Error(*run.t.batch_error);
    });
    // Nothing was applied since, so the gradients can be had again to say where it began.
    const std::int64_t update = first + static_cast<std::int64_t>(i);
    read_batches(run, update, update);
    compute_gradients(be, *run.comm, run.config, run.t, *run.batches);
    throw AgreedError(Exit::numbers,
                      fmt::format("[numbers] update {}: loss {}, gradient norm {}; {}; nothing was applied", update,
                                  std::abs(loss[i]), std::abs(norm[i]),  // abs: no "-nan"
                                  first_not_finite(be, *run.comm, run.t)));
  }
}

// debug.compare_ranks: the weights that the ranks go on with are the same bits.
void compare_ranks(Run& run) {
  wait_for_weights(*run.comm, run.t);
  if (const std::string d = first_difference_of_ranks(*run.be, *run.comm, run.t); !d.empty())
    throw AgreedError(Exit::device, fmt::format("[ranks] update {}: {}", run.state.update, d));
}

// A measurement, which is the same on all ranks.
double checked(const Run& run, const char* what, double value) {
  if (!std::isfinite(value))
    throw AgreedError(Exit::numbers, fmt::format("[numbers] update {}: {} is {}; {}", run.state.update, what,
                                                 std::abs(value), first_not_finite(*run.be, *run.comm, run.t)));
  return value;
}

double run_validation(Run& run, const Panel* panel) {
  return checked(run, "the validation loss",
                 validate(*run.be, *run.comm, run.config.model, run.t.weights, run.t.activations, run.t.validation_loss,
                          *run.validation_set, panel));
}

struct Due {
  bool log, evaluation, diameter, checkpoint, last;
  bool record() const { return log || evaluation || diameter; }
};

Due due_at(const Config& c, std::int64_t update) {
  const bool last = update == c.last_update();
  const auto every = [&](std::int64_t n) { return n > 0 && (update % n == 0 || last); };
  const auto& keep = c.checkpoint.keep_updates;
  return {every(c.log_every), every(c.evaluation.every), every(c.diagnostics.diameter_every),
          last || every(c.checkpoint.every) || std::find(keep.begin(), keep.end(), update) != keep.end(), last};
}

// The last update up to `update` that has a record whatever may differ on resume; -1 for none.
std::int64_t last_measured(const Config& c, std::int64_t update) {
  std::int64_t latest = -1;
  for (const std::int64_t n : {c.evaluation.every, c.diagnostics.diameter_every})
    if (n > 0 && update >= n) latest = std::max(latest, update / n * n);
  return latest;
}

// The record of the update just made (README, "Metrics").
ordered_json make_record(Run& run, const Due& due, double lr_scale, double seconds, std::int64_t updates) {
  const Config& c = run.config;
  ordered_json r;
  r["progress/update"] = run.state.update;
  r["progress/tokens"] = run.state.update * c.tokens_per_update();
  if (due.log) {
    const auto count = static_cast<double>(run.state.loss_count);
    r["train/loss"] = run.state.loss_sum / count;
    r["train/grad_norm"] = run.be->read(run.t.control.norm);
    r["train/clipped_fraction"] = static_cast<double>(run.state.clipped_count) / count;
    r["train/lr_scale"] = lr_scale;
    r["train/lr/hidden"] = c.optimizer.hidden.lr * lr_scale;
    r["train/lr/embedding"] = c.optimizer.embedding.lr * lr_scale;
    r["train/lr/head"] = c.optimizer.head.lr * lr_scale;
    run.state.loss_sum = 0;
    run.state.loss_count = run.state.clipped_count = 0;
  }
  if (due.diameter) {
    share_head_step(*run.comm, run.t);
    const StepGeometry g = measure_step(*run.be, *run.comm, run.t.diameter, run.t.optimizer.head_step);
    r["diagnostics/lm_head_step/diameter_exact"] = checked(run, "the head step's diameter", g.diameter);
    r["diagnostics/lm_head_step/diameter_pair"] = g.pair;
    r["diagnostics/lm_head_step/row_norm_max"] = checked(run, "the head step's row norm", g.row_norm_max);
    r["diagnostics/lm_head_step/row_norm_median"] = g.row_norm_median;
  }
  if (due.evaluation) {
    const bool panel = !run.t.panel.ranges.empty();
    r["validation/loss"] = run_validation(run, panel ? &run.t.panel : nullptr);
    r["validation/tokens"] = c.evaluation.tokens;
    if (panel) {
      const double rms =
          hilbert_rms(*run.be, *run.comm, run.t.panel, owned_head_step(run.t.optimizer, run.comm->rank()));
      r["validation/hilbert_step/rms"] = checked(run, "the Hilbert RMS", rms);
      r["validation/hilbert_step/tokens"] = c.panel_positions();
    }
  }
  if (due.log && updates > 0) {
    r["performance/seconds_per_update"] = seconds / static_cast<double>(updates);
    const double rate = static_cast<double>(updates * c.tokens_per_update()) / seconds;
    r["performance/tokens_per_second"] = rate;
    if (c.peak_tflops)
      r["performance/mfu"] = rate * flops_per_token(c.model) / (*c.peak_tflops * 1e12 * run.comm->size());
    r["memory/peak_allocated_gib"] = static_cast<double>(run.planned_bytes) / (1024.0 * 1024.0 * 1024.0);
  }
  return r;
}

void report(const ordered_json& record, const Due& due, const ProgressState& progress) {
  std::string text = describe(progress);
  const auto add = [&](const char* key, const char* label, const char* format) {
    if (record.contains(key))
      text += fmt::format("  {} {}", label, fmt::format(fmt::runtime(format), record[key].get<double>()));
  };
  add("diagnostics/lm_head_step/diameter_exact", "D", "{:.3e}");
  add("validation/loss", "validation", "{:.4f}");
  add("validation/hilbert_step/rms", "Hilbert", "{:.3e}");
  if (due.log || due.evaluation) log_line(text);
}

void save(Run& run) {
  if (run.saved == run.state.update) return;
  on_first_rank(*run.comm, [&] { run.metrics->sync(); });
  write_checkpoint(run.config.output, *run.be, *run.comm, run.config, run.t, run.state, run.dataset);
  run.saved = run.state.update;
  const auto& [every, keep, keep_updates] = run.config.checkpoint;
  on_first_rank(*run.comm, [&, keep = keep] {
    remove_old_checkpoints(run.config.output, run.saved, keep, run.config.checkpoint.keep_updates);
  });
}

void write_summary(const Run& run) {
  ordered_json summary = {{"name", run.config.name},
                          {"finished", run.state.update == run.config.updates()},
                          {"updates", run.state.update},
                          {"tokens", run.state.update * run.config.tokens_per_update()},
                          {"parameters", parameter_count(run.config.model)},
                          {"final", latest_metrics(run.directory->path() / "metrics.jsonl")}};
  run.directory->write("summary.json", summary);
}

// The signal by which ranks were asked to stop before the update just enqueued or, of several ranks, the one before it:
// all of them then know (the flag travels with the gradient norm), and nobody waits for the newer one. 0: none.
int agreed_stop_signal(Run& run) {
  if (run.comm->size() == 1) return stop_signal();
  auto* asked = static_cast<double*>(run.asked.get());
  const auto now = static_cast<std::size_t>(run.state.update % 2), before = 1 - now;
  run.asked_copied[now] = run.be->start_download(asked + now, run.t.sums.rows(1, 2));
  if (!run.asked_copied[before]) return 0;  // the first update of this session
  run.be->wait(*run.asked_copied[before]);
  if (asked[before] == 0) return 0;
  const auto signals = run.comm->all_gather(std::to_string(stop_signal()));
  return std::stoi(*std::ranges::find_if(signals, [](const std::string& s) { return s != "0"; }));
}

// Updates until the last one or a signal; returns the signal, or 0.
int train_loop(Run& run) {
  const Config& c = run.config;
  const std::int64_t total = c.updates(), warmup = c.warmup(), last = c.last_update();
  if (c.evaluation.at_start && run.state.update == 0) {
    ordered_json r = {{"progress/update", 0}, {"progress/tokens", 0}};
    r["validation/loss"] = run_validation(run, nullptr);
    r["validation/tokens"] = c.evaluation.tokens;
    on_first_rank(*run.comm, [&] { run.metrics->append(r); });
    log_line(fmt::format("update 0: validation loss {:.4f}", r["validation/loss"].get<double>()));
  }

  const auto begun = Clock::now();
  const std::int64_t first = run.state.update;
  auto timed_from = Clock::now();  // updates alone: measurements and checkpoints are left out
  double seconds = 0;
  std::int64_t timed_updates = 0;
  ProgressState progress{first, last, 0, 0, 0};
  while (run.state.update < last) {
    const std::int64_t update = run.state.update + 1;
    const double scale = lr_scale(update - 1, total, warmup, c.schedule.min_lr_ratio);
    try {
      const BatchReader::Slot& next = run.batches->next();
      if (next.new_shard)
        together(*run.comm, [&] {
          if (next.error) throw Error(*next.error);
        });
    } catch (...) {  // a bad one ends the run, but nothing that was learnt is lost
      if (run.recent > 0) look_at_recent(run);
      save(run);
      throw;
    }
    step(*run.be, *run.comm, c, run.t, *run.batches, update, scale, stop_signal() != 0);
    run.be->copy(run.t.recent_loss.rows(run.recent, run.recent + 1), run.t.loss);
    run.be->copy(run.t.recent_norm.rows(run.recent, run.recent + 1), run.t.control.norm);
    run.state.update = update;
    run.recent += 1;
    timed_updates += 1;
    if (c.debug.compare_ranks) compare_ranks(run);

    const Due due = due_at(c, update);
    const int signal = agreed_stop_signal(run);
    if (!due.record() && !due.checkpoint && signal == 0 && run.recent < run.t.recent_loss.dim(0)) continue;
    look_at_recent(run);
    seconds += seconds_since(timed_from);
    progress.update = update;
    progress.loss =
        run.state.loss_count ? run.state.loss_sum / static_cast<double>(run.state.loss_count) : progress.loss;
    if (due.record()) {
      const ordered_json record = make_record(run, due, scale, seconds, timed_updates);
      on_first_rank(*run.comm, [&] { run.metrics->append(record); });
      if (due.log) {
        progress.tokens_per_second = static_cast<double>(timed_updates * c.tokens_per_update()) / seconds;
        seconds = 0;
        timed_updates = 0;
      }
      progress.seconds_left =
          seconds_since(begun) / static_cast<double>(update - first) * static_cast<double>(last - update);
      report(record, due, progress);
    }
    if (due.checkpoint || signal != 0) save(run);
    if (signal != 0 && !due.last) return signal;
    show_progress(progress);
    timed_from = Clock::now();
  }
  return 0;
}

// The checkpoint to continue from, on every rank: looked for and checked by rank 0, which locks the directory.
std::optional<Checkpoint> find_what_to_continue(Run& run, bool resume) {
  std::optional<Checkpoint> checkpoint;
  on_first_rank(*run.comm, [&] {
    const std::string& output = run.config.output;
    const bool exists = fs::exists(fs::symlink_status(output));
    if (exists && !resume)
      fail(Exit::data, "[output] {}: exists already; continue it with --resume, or name another output", output);
    if (!exists) return;
    run.directory.emplace(RunDirectory::open(output));
    checkpoint = checkpoint_to_resume(run.config);
    if (!checkpoint) log_line(fmt::format("{}: no checkpoint yet; starting anew", output));
  });
  const std::string found = from_first_rank(
      *run.comm, checkpoint ? json_text({{"path", checkpoint->path.string()}, {"state", checkpoint->state}}) : "");
  if (!run.writes() && !found.empty()) {
    auto document = ordered_json::parse(found);
    checkpoint = Checkpoint{document.at("path").get<std::string>(), std::move(document.at("state"))};
  }
  return checkpoint;
}

// Opens what a run has on disk; the metrics are cut off behind the checkpoint.
void open_outputs(Run& run, const std::optional<Checkpoint>& checkpoint) {
  const Config& c = run.config;
  const std::int64_t done = run.state.update;
  if (!run.directory) run.directory.emplace(RunDirectory::create(c.output));
  run.directory->write("config.json", to_json(c));
  log_to_file(run.directory->path() / "train.log");
  const fs::path metrics = run.directory->path() / "metrics.jsonl";
  run.metrics.emplace(metrics, checkpoint ? done : -1);
  if (const std::int64_t expected = last_measured(c, done); checkpoint && run.metrics->last_update() < expected)
    log_warning(fmt::format("[metrics] {}: ends at update {}, the record of update {} is missing", metrics.string(),
                            run.metrics->last_update(), expected));
  run.provenance.emplace(*run.directory, c, *run.be, *run.comm, run.dataset, done + 1);
}

int train(const TrainOptions& options, Comm& comm) {
  Run run(comm);
  together(comm, [&] {
    run.config = load_config(options.config, options.overrides, comm.size());
    check_device_and_precision(run.config.device, run.config.precision);
  });
  const Config& c = run.config;
  if (const std::string d =
          first_difference(comm, {{"config", to_json(c)}, {"--resume", options.resume}, {"program", version_line()}});
      !d.empty())
    throw AgreedError(Exit::usage, fmt::format("[ranks] not started alike: {}", d));

  const std::optional<Checkpoint> checkpoint = find_what_to_continue(run, options.resume);
  const std::int64_t done = checkpoint ? checkpoint->state.at("update").get<std::int64_t>() : 0;
  if (checkpoint && done >= c.last_update()) {
    run.state.update = done;
    on_first_rank(comm, [&] { write_summary(run); });
    log_line(fmt::format("finished already: {} updates in {}", done, c.output));
    return static_cast<int>(Exit::ok);
  }

  together(comm, [&] {
    std::string no_cuda;
    run.be = open_backend(c.device, c.precision, comm.local_rank(), comm.local_size(), &no_cuda);
    check_newton_schulz(c, *run.be);
    log_line(version_line());
    log_line(fmt::format("device: {}{}{}", run.be->description(), c.device == "auto" ? " (chosen by \"auto\")" : "",
                         comm.size() > 1 ? fmt::format("; {} ranks", comm.size()) : ""));
    if (!no_cuda.empty()) log_line(fmt::format("no CUDA: {}", no_cuda));
    open_data(run, done);
    if (!checkpoint) return;
    const std::string d = difference(checkpoint->state.at("dataset"), "at the checkpoint", run.dataset, "now");
    if (!d.empty()) fail(Exit::data, "[resume] the data are not the checkpoint's: {}", d);
  });
  if (const std::string d = first_shard_difference(comm, run.dataset); !d.empty())
    throw AgreedError(Exit::data, fmt::format("[ranks] do not see the same shards: {}", d));
  if (comm.size() > 1) exchange_over_devices(run);
  together(comm, [&] {
    plan_memory(run);
    if (checkpoint) {
      run.state = load_checkpoint(checkpoint->path, checkpoint->state, *run.be, c, run.t);
      run.saved = run.state.update;
      log_line(fmt::format("resumed from {}", checkpoint->path.string()));
    } else {
      if (c.init_from)
        load_weights(*run.be, run.t.master, c.model, *c.init_from);
      else
        initialize(*run.be, run.t.master, c.model, c.seed);
      copy(*run.be, run.t.weights, run.t.master);
    }
    read_batches(run, done + 1, c.last_update());
  });
  on_first_rank(comm, [&] { open_outputs(run, checkpoint); });
  log_line(fmt::format("{}: {} parameters, updates {} to {} of {} tokens each, {} training and {} validation shards",
                       c.name, parameter_count(c.model), done + 1, c.last_update(), c.tokens_per_update(),
                       run.train->shards().size(), run.validation->shards().size()));

  catch_stop_signals();
  int signal = 0;
  try {
    signal = train_loop(run);
  } catch (const std::exception& e) {
    try {
      if (run.provenance) run.provenance->finish(run.state.update, e.what());
    } catch (const Error&) {  // of a full disk the first file that did not fit says more
    }
    throw;
  }
  on_first_rank(*run.comm, [&] {
    if (signal == 0) write_summary(run);
    run.provenance->finish(run.state.update, signal != 0 ? fmt::format("stopped by SIG{}", sigabbrev_np(signal))
                                             : run.state.update == c.updates() ? "finished"
                                                                               : "stopped at schedule.max_updates");
  });
  if (signal != 0)
    log_line(
        fmt::format("SIG{}: stopped after update {}; continue with --resume", sigabbrev_np(signal), run.state.update));
  else
    log_line(fmt::format("finished: {}", (fs::path(c.output) / "summary.json").string()));
  return signal != 0 ? 128 + signal : static_cast<int>(Exit::ok);
}

}  // namespace

int train_command(const TrainOptions& options) {
  if (options.dry_run) {
    const Launcher launcher = find_launcher().value_or(Launcher{});
    const int ranks = std::max(1, launcher.size);
    if (launcher.rank > 0) log_nothing();  // rank 0 does the same
    const Config config = load_config(options.config, options.overrides, ranks);
    check_device_and_precision(config.device, config.precision);
    if (launcher.rank == 0) print_plan(config, ranks);
    return static_cast<int>(Exit::ok);
  }
  return on_every_rank("train", [&](Comm& comm) { return train(options, comm); });
}

}  // namespace rownorm
