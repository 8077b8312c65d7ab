// Validation loss on the fixed sequential prefix, and on the way the hidden states of the Hilbert panel.
#pragma once
#include "comm/comm.h"
#include "data/batches.h"
#include "geometry/hilbert.h"
#include "model/transformer.h"
#include "ops/backend.h"

namespace rownorm {

// Mean next-token cross entropy over all of `data`'s sequences, in batches of at most the activations' size dealt to
// the ranks in turn. Error (exit 3), the same on all ranks: data overwritten in use. `loss` is a 1-element f64 tensor;
// `panel` (null: none) gets its rows of the hidden states.
double validate(Backend& be, Comm& comm, const ModelConfig& model, const Parameters& weights,
                const Activations& activations, Tensor loss, ValidationSet& data, const Panel* panel);

}  // namespace rownorm
