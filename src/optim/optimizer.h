// The update of all parameters: each role by its own algorithm, each piece by its owner.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "base/arena.h"
#include "comm/comm.h"
#include "model/parameters.h"
#include "ops/backend.h"
#include "optim/config.h"
#include "optim/ownership.h"
#include "optim/slot.h"

namespace rownorm {

struct Optimizer {
  std::vector<ParameterInfo> table;
  std::vector<Piece> pieces;          // every rank's, in table order
  std::vector<Tensor> first, second;  // moments of each piece (Slot); null where another rank's or not used
  Tensor scratch;      // (max(layer block, V d)): the increments of some layers, the embedding or the head
  Tensor head_step;    // (V, d) view of scratch: after update(), S of the owned rows of the head
  Tensor column_sums;  // (max(d, F)) f64
  Tensor lr_hidden, lr_embedding, lr_head;  // (1) f64
};

// What update() asks of newton_schulz at a time, at most, on any rank.
std::vector<NewtonSchulzSizes> newton_schulz_sizes(const ModelConfig& model, const OptimizerConfigs& configs);

Optimizer make_optimizer(Arena& arena, const ModelConfig& model, const OptimizerConfigs& configs, DType master,
                         int rank, int ranks);

// Update number t = 1, 2, ... of this rank's pieces, every peak rate multiplied by lr_scale: S into scratch, then
// W = (1 - lr wd) W + S. The head comes last, so that its S stays in head_step.
void update(Backend& be, Comm& comm, const Optimizer& optimizer, const OptimizerConfigs& configs,
            const Parameters& weights, const Parameters& gradients, const UpdateControl& control, double lr_scale,
            std::int64_t t);

// The rows of S that this rank's last update() made; none where another rank owns the head.
Tensor owned_head_step(const Optimizer& optimizer, int rank);

// The state of every piece by name, "<parameter>.momentum_buffer", ".exp_avg", ".exp_avg_sq", grouped by name: rows of
// a tensor of the parameter's shape. `tensor` is null where another rank's.
struct NamedState {
  std::string name;
  Piece piece;
  Tensor tensor;
};
std::vector<NamedState> named_state(const Optimizer& optimizer, const OptimizerConfigs& configs);

}  // namespace rownorm
