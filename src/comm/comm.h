// Ranks and what they exchange. Device tensors are reduced and broadcast in place, in a fixed order; collectives are
// called by all ranks in the same order. With one process every call is an identity.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/tensor.h"

namespace rownorm {

class Backend;

enum class Reduction { sum, max, min };

class Comm {
 public:
  using Ticket = std::int64_t;

  virtual ~Comm() = default;
  virtual std::string description() const = 0;  // what exchanges tensors, "NCCL 2.27.3" or "none", for run.json
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual int local_rank() const = 0;  // among the ranks of this machine
  virtual int local_size() const = 0;

  // Update u is under way, for the errors of what follows; 0: none yet.
  virtual void begin_update(std::int64_t) {}

  // In place on every rank; sums of f64, f32, i32, bf16, minima and maxima of f64, f32, i32. Over MPI sums are added in
  // f64 in rank order, then rounded (bf16 by way of f32); over NCCL in its order, which is fixed for one version of it
  // and one topology. Ordered like start_*: after what is enqueued, before what comes next. min and max are NaN where
  // any rank's value is, as everywhere in the operations.
  virtual void all_reduce(Tensor t, Reduction how) = 0;
  // start_*: ordered after the work enqueued on the device so far, and may overlap what is enqueued next. After wait()
  // everything enqueued sees the result. The tensor may not be touched in between. `what` names it in errors.
  virtual Ticket start_reduce(Tensor t, int owner, std::string_view what = {}) = 0;     // sum, valid on `owner` only
  virtual Ticket start_broadcast(Tensor t, int owner, std::string_view what = {}) = 0;  // owner's values on every rank
  virtual void wait(Ticket ticket) = 0;

  // One text of every rank, on every rank, in rank order (configs to compare, errors to agree on).
  virtual std::vector<std::string> all_gather(const std::string& text) = 0;
  // `bytes` of host memory of rank `from` arrive in that of rank `to`; called by these two alone, nothing if they are
  // one.
  virtual void transfer(void* host, std::int64_t bytes, int from, int to) = 0;

  // Ends the processes of all ranks with this exit code: for an error that the other ranks do not know of.
  virtual void abort(int code) = 0;
};

std::unique_ptr<Comm> make_single_process();
// The ranks that an MPI launcher started; to be made once in a process, destroyed on all ranks. The host's memory is
// what it reduces: CPU tensors. Error (exit 5): MPI does not work, or this build is without it.
std::unique_ptr<Comm> make_mpi();

// The same ranks, one a GPU, whose tensors are the CUDA backend's: NCCL exchanges them on a stream of its own. Texts
// and host memory go through `ranks`, once nothing is under way on the device. Called by all ranks; goes before `ranks`
// and `cuda`. A collective that fails, or is not done `timeout_seconds` after nothing but the other ranks kept it from
// beginning, is told to `report` (from another thread) and ends the processes of all ranks with exit 5.
// AgreedError (exit 5): no NCCL, two ranks on one device, or NCCL's own.
std::unique_ptr<Comm> make_nccl(Comm& ranks, Backend& cuda, double timeout_seconds,
                                const std::function<void(const std::string&)>& report);

// What a launcher's environment variables say of this process, without MPI.
struct Launcher {
  std::string name;   // "Open MPI's mpirun"
  std::string found;  // "OMPI_COMM_WORLD_SIZE=4"
  int rank = 0;
  int size = 0;  // 0: not said
};
std::optional<Launcher> find_launcher();

// One process unless a launcher started more. Error (exit 5) where the launcher says that there are several and MPI
// sees one: each would train the whole model into the same directory.
std::unique_ptr<Comm> open_comm();

// ---- errors of several ranks ----

// An error that every rank throws at the same point, so that one report and one exit code do.
class AgreedError : public Error {
 public:
  using Error::Error;
};

// Runs `local` on every rank. It calls no collective. Where it throws on any, all throw the first such rank's error.
void together(Comm& comm, const std::function<void()>& local);

// The same for rank 0 alone.
void on_first_rank(Comm& comm, const std::function<void()>& work);

// Rank 0's text on every rank.
std::string from_first_rank(Comm& comm, const std::string& text);

}  // namespace rownorm
