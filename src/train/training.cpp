#include "train/training.h"

#include <algorithm>

namespace rownorm {

WorkspaceSizes workspace_sizes(const Config& config) {
  const ModelConfig& m = config.model;
  WorkspaceSizes sizes;
  sizes.tokens = config.batch.micro_batch * m.context;
  sizes.context = m.context;
  sizes.width = m.width;
  sizes.heads = m.heads();
  sizes.vocab = m.vocab_size;
  sizes.panel = config.panel_positions();
  sizes.diameter = config.diagnostics.diameter_every > 0;
  sizes.newton_schulz = newton_schulz_sizes(m, config.optimizer);
  return sizes;
}

Training make_training(Arena& arena, const Config& config, DType compute, DType master, std::int64_t workspace_bytes,
                       int rank, int ranks) {
  const ModelConfig& m = config.model;
  Training t;
  t.master = make_parameters(arena, "weights", m, master);
  t.weights = compute == master ? t.master : make_parameters(arena, "weights", m, compute);
  t.gradients = make_parameters(arena, "gradients", m, master);
  t.optimizer = make_optimizer(arena, m, config.optimizer, master, rank, ranks);
  t.activations = make_activations(arena, m, config.batch.micro_batch, compute, master, Passes::forward_and_backward,
                                   config.recompute);

  const std::int64_t updates_between_reads = std::clamp<std::int64_t>(config.log_every, 1, 64);
  const auto scalars = [&](std::int64_t n, DType dtype = DType::f64) { return arena.add("step", dtype, {n}); };
  t.loss = scalars(1);
  t.sums = scalars(2);
  t.control = {scalars(1), scalars(1), scalars(1, DType::i32)};
  t.recent_loss = scalars(updates_between_reads);
  t.recent_norm = scalars(updates_between_reads);
  t.validation_loss = scalars(1);
  t.diameter = make_diameter(arena, m.vocab_size);
  t.panel = make_panel(arena, config.diagnostics.hilbert_panel, m.width, compute, master);
  t.workspace = arena.add("workspace", DType::u8, {workspace_bytes});
  return t;
}

}  // namespace rownorm
