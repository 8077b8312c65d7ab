// Every tensor of a training run, planned in one arena.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "base/arena.h"
#include "base/error.h"
#include "comm/comm.h"
#include "geometry/diameter.h"
#include "geometry/hilbert.h"
#include "model/parameters.h"
#include "model/transformer.h"
#include "ops/backend.h"
#include "optim/optimizer.h"
#include "train/config.h"

namespace rownorm {

struct Training {
  Parameters master;     // what the optimizers update and checkpoints hold
  Parameters weights;    // what the products read: the same storage where compute and master precision are equal
  Parameters gradients;  // master precision
  Activations activations;
  Optimizer optimizer;
  Tensor loss;  // (1) f64  mean cross entropy of the update under way
  Tensor sums;  // (2) f64  over the ranks: squared gradient norm; how many were asked to stop
  UpdateControl control;
  // Loss and gradient norm of the updates since the host last looked, so that it need not wait for each.
  Tensor recent_loss, recent_norm;  // (K) f64
  Tensor validation_loss;           // (1) f64
  DiameterTensors diameter;
  Panel panel;
  Tensor workspace;  // (bytes) u8, the backend's
  // Kept so that the loop allocates nothing: the exchange under way.
  std::vector<Comm::Ticket> tickets;
  std::vector<std::vector<Comm::Ticket>> arriving;  // new weights: the embedding's, each layer's, the head's
  // Why this rank could not read a batch: its loss is then NaN, so that nothing is applied on any rank.
  std::optional<Error> batch_error;
};

WorkspaceSizes workspace_sizes(const Config& config);

Training make_training(Arena& arena, const Config& config, DType compute, DType master, std::int64_t workspace_bytes,
                       int rank, int ranks);

}  // namespace rownorm
