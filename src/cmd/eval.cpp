// rownorm eval: a checkpoint's loss and perplexity on shards.
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "cmd/commands.h"
#include "comm/comm.h"
#include "data/batches.h"
#include "ops/open.h"
#include "train/checkpoint.h"
#include "train/config.h"
#include "train/log.h"
#include "train/run_directory.h"
#include "train/validation.h"

namespace rownorm {

int eval_command(const EvalOptions& options) {
  check_device_and_precision(options.device, options.precision);
  if (options.tokens.value_or(0) < 0) fail(Exit::usage, "[eval] --tokens {}: must be at least 0", *options.tokens);
  const auto [checkpoint, state] = find_checkpoint(options.checkpoint);
  const Config config = parse_config(state.at("config").dump(), (checkpoint / "state.json").string(), {});
  const ModelConfig& model = config.model;

  ShardSet shards("evaluation", options.data.empty() ? config.data.validation : options.data, model.vocab_size);
  std::int64_t available = 0;
  for (const ShardInfo& s : shards.shards()) available += blocks_of(s.tokens, model.context);
  const std::int64_t tokens = options.tokens.value_or(options.data.empty() ? config.evaluation.tokens : 0);
  if (tokens % model.context != 0)
    fail(Exit::usage, "[eval] --tokens {}: must be 0 or a multiple of the context {}", tokens, model.context);
  const std::int64_t sequences = tokens == 0 ? available : tokens / model.context;
  if (sequences == 0) fail(Exit::data, "[eval] {}: holds no whole sequence of {} tokens", options.data, model.context);
  ValidationSet data(shards, model.context, sequences);

  const auto be = open_backend(options.device, options.precision);
  const std::int64_t at_once =
      std::min(sequences, options.micro_batch > 0 ? options.micro_batch : config.batch.micro_batch);
  WorkspaceSizes sizes;
  sizes.tokens = at_once * model.context;
  sizes.context = model.context;
  sizes.width = model.width;
  sizes.heads = model.heads();
  sizes.vocab = model.vocab_size;
  Parameters master, weights;
  Activations activations;
  Tensor loss, workspace;
  const Memory memory = allocate_tensors(*be, [&](Arena& arena) {
    master = make_parameters(arena, "weights", model, be->master_dtype());
    weights = be->compute_dtype() == be->master_dtype() ? master
                                                        : make_parameters(arena, "weights", model, be->compute_dtype());
    activations = make_activations(arena, model, at_once, be->compute_dtype(), be->master_dtype(), Passes::forward,
                                   Recompute::none);
    loss = arena.add("step", DType::f64, {1});
    workspace = arena.add("workspace", DType::u8, {be->workspace_bytes(sizes)});
  });
  be->set_workspace(workspace, sizes);
  upload_rope(*be, activations, model);
  load_weights(*be, master, model, checkpoint / "model.safetensors");
  copy(*be, weights, master);

  log_line(fmt::format("{}: {} sequences of {} tokens on {}", checkpoint.string(), sequences, model.context,
                       be->description()));
  const auto comm = make_single_process();
  const double mean = validate(*be, *comm, model, weights, activations, loss, data, nullptr);
  if (!std::isfinite(mean)) fail(Exit::numbers, "[eval] {}: loss {}", checkpoint.string(), mean);
  const nlohmann::ordered_json result = {
      {"checkpoint", checkpoint.string()}, {"update", state.at("update")}, {"loss", mean},
      {"perplexity", std::exp(mean)},      {"sequences", sequences},       {"tokens", sequences * model.context}};
  fmt::print("{}\n", json_text(result, 2));
  return static_cast<int>(Exit::ok);
}

}  // namespace rownorm
