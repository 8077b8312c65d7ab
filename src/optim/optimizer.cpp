#include "optim/optimizer.h"

#include <algorithm>
#include <map>
#include <utility>

#include "optim/adamw.h"
#include "optim/muon.h"
#include "optim/rownorm.h"

namespace rownorm {
namespace {

// Elements of one layer's matrices.
std::int64_t layer_elements(const ModelConfig& model) {
  return 4 * model.width * model.width + 3 * model.mlp_width() * model.width;
}

// Elements of scratch. Where the head's increment leaves room for several layers', these share it and are updated
// together: more matrices for a call of newton_schulz, which a GPU needs to be busy.
std::int64_t scratch_elements(const ModelConfig& model) {
  return std::max(layer_elements(model), model.vocab_size * model.width);
}

}  // namespace

std::vector<NewtonSchulzSizes> newton_schulz_sizes(const ModelConfig& model, const OptimizerConfigs& configs) {
  std::map<std::pair<std::int64_t, std::int64_t>, std::int64_t> matrices;  // of a shape: muon_step
  const std::int64_t layers_at_once = std::min(scratch_elements(model) / layer_elements(model), model.layers);
  std::vector<NewtonSchulzSizes> sizes;
  const auto add = [&](Role role, std::int64_t rows, std::int64_t cols, std::int64_t count) {
    const OptimizerConfig& config = config_of(configs, role);
    if (config.algorithm == Algorithm::muon)
      sizes.push_back({count, std::min(rows, cols), std::max(rows, cols), config.newton_schulz_precision});
  };
  for (const ParameterInfo& p : parameter_table(model)) {
    if (p.role != Role::hidden) add(p.role, p.rows, p.cols, 1);
    if (p.layer == 0) matrices[{p.rows, p.cols}] += layers_at_once;
  }
  for (const auto& [shape, count] : matrices) add(Role::hidden, shape.first, shape.second, count);
  return sizes;
}

Optimizer make_optimizer(Arena& arena, const ModelConfig& model, const OptimizerConfigs& configs, DType master,
                         int rank, int ranks) {
  Optimizer o;
  o.table = parameter_table(model);
  o.pieces = divide(o.table, configs, ranks);
  for (const Piece& piece : o.pieces) {
    const ParameterInfo& p = o.table[piece.parameter];
    const Shape shape{piece.end - piece.begin, p.cols};
    const bool mine = piece.owner == rank, adamw = config_of(configs, p.role).algorithm == Algorithm::adamw;
    o.first.push_back(mine ? arena.add("optimizer state", master, shape) : Tensor{});
    o.second.push_back(mine && adamw ? arena.add("optimizer state", master, shape) : Tensor{});
  }
  const std::int64_t head = model.vocab_size * model.width;
  o.scratch = arena.add("step", master, {scratch_elements(model)});
  o.head_step = o.scratch.rows(0, head).reshape({model.vocab_size, model.width});
  o.column_sums = arena.add("step", DType::f64, {std::max(model.width, model.mlp_width())});
  for (Tensor* lr : {&o.lr_hidden, &o.lr_embedding, &o.lr_head}) *lr = arena.add("step", DType::f64, {1});
  return o;
}

void update(Backend& be, Comm& comm, const Optimizer& o, const OptimizerConfigs& configs, const Parameters& weights,
            const Parameters& gradients, const UpdateControl& control, double lr_scale, std::int64_t t) {
  be.fill(o.lr_hidden, configs.hidden.lr * lr_scale);
  be.fill(o.lr_embedding, configs.embedding.lr * lr_scale);
  be.fill(o.lr_head, configs.head.lr * lr_scale);

  // The pieces of one parameter group share scratch, one after another from `offset` elements on.
  const auto slot = [&](std::size_t i, std::int64_t offset) {
    const Piece& piece = o.pieces[i];
    const std::int64_t rows = piece.end - piece.begin, cols = o.table[piece.parameter].cols;
    return Slot{weights.matrices[piece.parameter].rows(piece.begin, piece.end),
                gradients.matrices[piece.parameter].rows(piece.begin, piece.end),
                o.scratch.rows(offset, offset + rows * cols).reshape({rows, cols}), o.first[i], o.second[i]};
  };
  const auto step = [&](Role role, const std::vector<Slot>& slots, std::int64_t total_rows, Tensor lr) {
    const OptimizerConfig& config = config_of(configs, role);
    Comm* rows_over = role == Role::hidden ? nullptr : &comm;
    if (config.algorithm == Algorithm::muon) muon_step(be, config, slots, lr, control);
    for (const Slot& s : slots) {
      if (config.algorithm == Algorithm::adamw) adamw_step(be, config, s, lr, control, t);
      if (config.algorithm == Algorithm::rownorm)
        rownorm_step(be, rows_over, config, s, rows_over ? total_rows : s.step.dim(0),
                     o.column_sums.rows(0, s.step.dim(1)), lr, control, t);
      be.apply_step(s.weight, s.step, lr, config.weight_decay, control);
    }
  };

  const int rank = comm.rank();
  const auto owned = [&](std::size_t i, Role role, std::int64_t layer) {
    const ParameterInfo& p = o.table[o.pieces[i].parameter];
    return o.pieces[i].owner == rank && p.role == role && p.layer == layer;
  };
  std::vector<Slot> slots;  // of the layers that share scratch
  std::int64_t offset = 0;
  const auto step_hidden = [&] {
    step(Role::hidden, slots, 0, o.lr_hidden);
    slots.clear();
    offset = 0;
  };
  for (std::int64_t layer = 0; layer < static_cast<std::int64_t>(weights.layers.size()); ++layer) {
    if (offset + weights.layers[static_cast<std::size_t>(layer)].all.size() > o.scratch.size()) step_hidden();
    for (std::size_t i = 0; i < o.pieces.size(); ++i)
      if (owned(i, Role::hidden, layer)) {
        slots.push_back(slot(i, offset));
        offset += slots.back().step.size();
      }
  }
  step_hidden();
  for (const auto& [role, lr] : {std::pair{Role::embedding, o.lr_embedding}, {Role::head, o.lr_head}})
    for (std::size_t i = 0; i < o.pieces.size(); ++i)
      if (owned(i, role, -1)) {
        const ParameterInfo& p = o.table[o.pieces[i].parameter];
        step(role, {slot(i, o.pieces[i].begin * p.cols)}, p.rows, lr);
      }
}

Tensor owned_head_step(const Optimizer& o, int rank) {
  for (const Piece& piece : o.pieces)
    if (o.table[piece.parameter].role == Role::head && piece.owner == rank)
      return o.head_step.rows(piece.begin, piece.end);
  return o.head_step.rows(0, 0);
}

std::vector<NamedState> named_state(const Optimizer& o, const OptimizerConfigs& configs) {
  std::vector<NamedState> state;
  for (std::size_t begin = 0, end = 0; begin < o.pieces.size(); begin = end) {  // the pieces of one parameter
    while (end < o.pieces.size() && o.pieces[end].parameter == o.pieces[begin].parameter) ++end;
    const ParameterInfo& p = o.table[o.pieces[begin].parameter];
    const auto add = [&](const char* suffix, const std::vector<Tensor>& tensors) {
      for (std::size_t i = begin; i < end; ++i) state.push_back({p.name + suffix, o.pieces[i], tensors[i]});
    };
    const bool adamw = config_of(configs, p.role).algorithm == Algorithm::adamw;
    add(adamw ? ".exp_avg" : ".momentum_buffer", o.first);
    if (adamw) add(".exp_avg_sq", o.second);
  }
  return state;
}

}  // namespace rownorm
