// Commands on several ranks.
#include "base/error.h"
#include "cmd/commands.h"
#include "comm/comm.h"
#include "train/log.h"

namespace rownorm {

int on_every_rank(const std::function<int(Comm&)>& body) {
  const auto comm = open_comm();
  if (comm->size() == 1) return body(*comm);
  if (comm->rank() != 0) log_errors_only();
  int code = 0;
  try {
    code = body(*comm);
  } catch (const AgreedError& error) {
    if (comm->rank() == 0) log_error(error.what());
    code = static_cast<int>(error.code());
  } catch (...) {
    const Error error = current_error();
    log_error(fmt::format("{} (on rank {} of {})", error.what(), comm->rank(), comm->size()));
    comm->abort(static_cast<int>(error.code()));
  }
  comm->all_gather(
      "");  // mpirun ends the others as soon as one leaves with an error: none does before rank 0 has spoken
  return code;
}

int as_one_process(const char* command, const std::function<int()>& body) {
  return on_every_rank([&](Comm& comm) {
    if (comm.size() > 1)
      throw AgreedError(Exit::usage,
                        fmt::format("[usage] {}: is one process, started as {} ranks", command, comm.size()));
    return body();
  });
}

}  // namespace rownorm
