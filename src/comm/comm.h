// Ranks and what they exchange. Device tensors are reduced and broadcast in place, in a fixed order; collectives are
// called by all ranks in the same order. With one process every call is an identity.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/tensor.h"

namespace rownorm {

enum class Reduction { sum, max, min };

class Comm {
 public:
  using Ticket = std::int64_t;

  virtual ~Comm() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // In place on every rank; f64, f32, i32, and bf16 (added in f32). Ordered like start_*: after what is enqueued,
  // before what comes next. min and max are NaN where any rank's value is, as everywhere in the operations.
  virtual void all_reduce(Tensor t, Reduction how) = 0;
  // start_*: ordered after the work enqueued on the device so far, and may overlap what is enqueued next. After wait()
  // everything enqueued sees the result. The tensor may not be touched in between.
  virtual Ticket start_reduce(Tensor t, int owner) = 0;     // sum over ranks, valid on `owner` only
  virtual Ticket start_broadcast(Tensor t, int owner) = 0;  // owner's values on every rank
  virtual void wait(Ticket ticket) = 0;

  // One text of every rank, on every rank, in rank order (configs to compare, errors to agree on).
  virtual std::vector<std::string> all_gather(const std::string& text) = 0;
};

std::unique_ptr<Comm> make_single_process();

}  // namespace rownorm
