// rownorm eval: a checkpoint's loss and perplexity on shards.
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/json.h"
#include "cmd/commands.h"
#include "comm/comm.h"
#include "data/batches.h"
#include "ops/open.h"
#include "train/log.h"
#include "train/run_directory.h"
#include "train/trained_model.h"
#include "train/validation.h"

namespace rownorm {

int eval_command(const EvalOptions& options) {
  check_device_and_precision(options.device, options.precision);
  const TrainedModel trained = find_trained_model(options.checkpoint);
  const Config& config = trained.config;
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

  const std::int64_t at_once =
      std::min(sequences, options.micro_batch > 0 ? options.micro_batch : config.batch.micro_batch);
  Tensor loss;
  const LoadedModel loaded =
      load_model(trained, options.device, options.precision, at_once,
                 [&](Arena& arena, const Backend&) { loss = arena.add("step", DType::f64, {1}); });

  log_line(fmt::format("{}: {} sequences of {} tokens on {}", trained.name(), sequences, model.context,
                       loaded.be->description()));
  const auto comm = make_single_process();
  const double mean = validate(*loaded.be, *comm, model, loaded.weights, loaded.activations, loss, data, nullptr);
  if (!std::isfinite(mean)) fail(Exit::numbers, "[eval] {}: loss {}", trained.name(), mean);
  const nlohmann::ordered_json result = {{"checkpoint", trained.name()},
                                         {"update", trained.checkpoint.state.at("update")},
                                         {"loss", mean},
                                         {"perplexity", std::exp(mean)},
                                         {"sequences", sequences},
                                         {"tokens", sequences * model.context}};
  fmt::print("{}\n", json_text(result, 2));
  return static_cast<int>(Exit::ok);
}

}  // namespace rownorm
