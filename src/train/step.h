// One optimizer update, in order: gradients, reduction over ranks, global norm, clip, update, broadcast. A layer's
// gradients travel while backward goes on, its new weights while the next forward does, which waits for each layer's.
#pragma once
#include <cstdint>

#include "comm/comm.h"
#include "ops/backend.h"
#include "train/batch_reader.h"
#include "train/config.h"
#include "train/training.h"

namespace rownorm {

// Gradients of the mean loss over the next update's sequences, summed over its micro-batches and reduced to their
// owners; t.loss is that mean over all of them, on every rank. A batch that cannot be read sets t.batch_error and makes
// the loss NaN.
void compute_gradients(Backend& be, Comm& comm, const Config& config, Training& t, BatchReader& batches);

// Update number `update` = 1, 2, ..., the next one of the batches. Leaves the loss, the norm before clipping
// (t.control) and this rank's rows of the head's increment S (t.optimizer.head_step) on the device. If loss or norm is
// not finite nothing changes, in this update and all later ones. `stop`: this rank was asked to stop; t.sums says how
// many were.
void step(Backend& be, Comm& comm, const Config& config, Training& t, BatchReader& batches, std::int64_t update,
          double lr_scale, bool stop = false);

// Update `step` leaves the new weights on their way: to be called before anything but `step` reads them.
void wait_for_weights(Comm& comm, Training& t);

// Makes t.optimizer.head_step whole on every rank.
void share_head_step(Comm& comm, Training& t);

}  // namespace rownorm
