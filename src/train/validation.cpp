#include "train/validation.h"

#include <algorithm>

namespace rownorm {

double validate(Backend& be, Comm& comm, const ModelConfig& model, const Parameters& weights,
                const Activations& activations, Tensor loss, ValidationSet& data, const Panel* panel) {
  const std::int64_t at_once = activations.tokens.dim(0) / model.context;
  const double scale = 1 / static_cast<double>(data.sequences() * model.context);
  Batch batch;
  be.fill(loss, 0);
  if (panel) be.fill(panel->hidden, 0);
  const auto batch_of_this_rank = [&](std::int64_t i) {
    const std::int64_t first = i * at_once, count = std::min(at_once, data.sequences() - first);
    Activations a = first_sequences(activations, count);
    data.read(batch, first, count);
    be.upload(a.tokens, batch.inputs.data());
    be.upload(a.targets, batch.targets.data());
    forward(be, model, weights, a);
    be.head_loss(loss, a.hidden, weights.head, a.targets, scale);
    if (panel) collect(be, *panel, a.hidden, first * model.context);
  };
  together(comm, [&] {
    for (std::int64_t i = comm.rank(); i * at_once < data.sequences(); i += comm.size()) batch_of_this_rank(i);
  });
  comm.all_reduce(loss, Reduction::sum);
  return be.read(loss);
}

}  // namespace rownorm
