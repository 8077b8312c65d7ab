#include "train/step.h"

#include <limits>
#include <string>

namespace rownorm {
namespace {

// Calls each(block, owner, name) for every contiguous block of layer `layer`'s parameters with one owner, layer -1 and
// a role for embedding and head; block(parameters) is its tensor.
template <class Each>
void for_each_block(const Training& t, Role role, std::int64_t layer, Each each) {
  for (const Piece& piece : t.optimizer.pieces) {
    const ParameterInfo& p = t.optimizer.table[piece.parameter];
    if (p.role != role || p.layer != layer) continue;
    if (role == Role::hidden) {  // a layer has one owner
      each([layer](const Parameters& all) { return all.layers[static_cast<std::size_t>(layer)].all; }, piece.owner,
           fmt::format("blocks.{}", layer));
      return;
    }
    if (piece.begin < piece.end)
      each([&piece](const Parameters& all) { return all.matrices[piece.parameter].rows(piece.begin, piece.end); },
           piece.owner, p.name);
  }
}

void wait_for(Comm& comm, std::vector<Comm::Ticket>& tickets) {
  for (const Comm::Ticket ticket : tickets) comm.wait(ticket);
  tickets.clear();
}

// Each owner's new weights to all, in compute precision, in the order in which forward needs them.
void send_weights(Backend& be, Comm& comm, Training& t) {
  const auto layers = static_cast<std::int64_t>(t.weights.layers.size());
  t.arriving.resize(static_cast<std::size_t>(layers + 2));
  const auto send = [&](Role role, std::int64_t layer, std::vector<Comm::Ticket>& tickets) {
    for_each_block(t, role, layer, [&](auto block, int owner, const std::string& name) {
      const Tensor weights = block(t.weights), master = block(t.master);
      if (owner == comm.rank() && weights.data != master.data) be.copy(weights, master);
      tickets.push_back(comm.start_broadcast(weights, owner, name));
    });
  };
  send(Role::embedding, -1, t.arriving.front());
  for (std::int64_t layer = 0; layer < layers; ++layer)
    send(Role::hidden, layer, t.arriving[static_cast<std::size_t>(1 + layer)]);
  send(Role::head, -1, t.arriving.back());
}

}  // namespace

void compute_gradients(Backend& be, Comm& comm, const Config& config, Training& t, BatchReader& batches) {
  const std::int64_t micro_steps = config.batch.sequences / (config.batch.micro_batch * comm.size());
  const double scale = 1 / static_cast<double>(config.tokens_per_update());
  Activations& a = t.activations;

  be.fill(t.loss, 0);
  zero(be, t.gradients);
  for (std::int64_t m = 0; m < micro_steps; ++m) {
    if (const auto& error = batches.next().error) t.batch_error = error;  // the others count on this rank below
    batches.upload_next(a.tokens, a.targets);
    const bool last = m + 1 == micro_steps;  // then a block is complete as soon as backward has passed it
    const auto reduce = [&](Role role, std::int64_t layer) {
      if (last)
        for_each_block(t, role, layer, [&](auto block, int owner, const std::string& name) {
          t.tickets.push_back(comm.start_reduce(block(t.gradients), owner, name));
        });
    };
    forward(be, config.model, t.weights, a, [&](std::int64_t layer) {
      if (!t.arriving.empty()) wait_for(comm, t.arriving[static_cast<std::size_t>(1 + layer)]);
    });
    wait_for_weights(comm, t);  // the head's
    be.head_loss(t.loss, a.dhidden, t.gradients.head, a.hidden, t.weights.head, a.targets, scale);
    reduce(Role::head, -1);
    backward(be, config.model, t.weights, t.gradients, a,
             [&](std::int64_t layer) { reduce(layer < 0 ? Role::embedding : Role::hidden, layer); });
  }
  if (t.batch_error) be.fill(t.loss, std::numeric_limits<double>::quiet_NaN());
  comm.all_reduce(t.loss, Reduction::sum);
  wait_for(comm, t.tickets);
}

void step(Backend& be, Comm& comm, const Config& config, Training& t, BatchReader& batches, std::int64_t update_number,
          double lr_scale, bool stop) {
  comm.begin_update(update_number);
  compute_gradients(be, comm, config, t, batches);

  // One global L2 norm over every parameter: each owner's squares in table order, then the sum over ranks (PAPER 4).
  const Tensor squares = t.sums.rows(0, 1), stopping = t.sums.rows(1, 2);
  be.fill(squares, 0);
  be.fill(stopping, stop ? 1 : 0);
  for (const Piece& piece : t.optimizer.pieces)
    if (piece.owner == comm.rank() && piece.begin < piece.end)
      be.squared_norm(squares, t.gradients.matrices[piece.parameter].rows(piece.begin, piece.end));
  comm.all_reduce(t.sums, Reduction::sum);
  be.clip(t.control, squares, t.loss, config.clip_norm);

  update(be, comm, t.optimizer, config.optimizer, t.master, t.gradients, t.control, lr_scale, update_number);

  send_weights(be, comm, t);
}

void wait_for_weights(Comm& comm, Training& t) {
  for (std::vector<Comm::Ticket>& tickets : t.arriving) wait_for(comm, tickets);
}

void share_head_step(Comm& comm, Training& t) {
  for (const Piece& piece : t.optimizer.pieces)
    if (t.optimizer.table[piece.parameter].role == Role::head && piece.begin < piece.end)
      t.tickets.push_back(
          comm.start_broadcast(t.optimizer.head_step.rows(piece.begin, piece.end), piece.owner, "the head's step"));
  wait_for(comm, t.tickets);
}

}  // namespace rownorm
