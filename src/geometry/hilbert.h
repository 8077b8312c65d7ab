// The RMS Hilbert perturbation of the head's step on a fixed validation panel (PAPER 1 and 5): over N positions with
// final hidden states h of the network after the update, sqrt(mean of (max_i (S h)_i - min_i (S h)_i)^2).
#pragma once
#include <cstdint>
#include <utility>
#include <vector>

#include "base/arena.h"
#include "comm/comm.h"
#include "ops/backend.h"

namespace rownorm {

// Half-open range of validation positions; sequence s holds positions [s * context, (s + 1) * context).
using PositionRange = std::pair<std::int64_t, std::int64_t>;

struct Panel {
  std::vector<PositionRange> ranges;  // disjoint
  Tensor hidden;                      // (N, d) compute
  Tensor lowest, highest;             // (N) master
};

// No ranges: a panel that measures nothing.
Panel make_panel(Arena& arena, const std::vector<PositionRange>& ranges, std::int64_t width, DType compute,
                 DType master);

// Copies the panel's rows out of the hidden states (n, d) of validation positions [first, first + n).
void collect(Backend& be, const Panel& panel, Tensor hidden, std::int64_t first);

// `step` holds this rank's rows of S (any split, possibly none); every rank has collected positions of its own, each
// exactly once, after a fill of panel.hidden with zeros.
double hilbert_rms(Backend& be, Comm& comm, const Panel& panel, Tensor step);

}  // namespace rownorm
