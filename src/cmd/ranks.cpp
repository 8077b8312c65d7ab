// Commands on several ranks.
#include "base/error.h"
#include "cmd/commands.h"
#include "comm/comm.h"
#include "train/log.h"

namespace rownorm {
namespace {

// Before anything else is exchanged: ranks that do not run the same command exchange different things.
void compare_commands(Comm& comm, const std::string& command) {
  const auto commands = comm.all_gather(command);
  for (std::size_t r = 1; r < commands.size(); ++r)
    if (commands[r] != commands[0])
      throw AgreedError(Exit::usage, fmt::format("[ranks] not started alike: {} on rank 0, {} on rank {}", commands[0],
                                                 commands[r], r));
}

}  // namespace

int on_every_rank(const std::string& command, const std::function<int(Comm&)>& body) {
  const auto comm = open_comm();
  if (comm->size() == 1) return body(*comm);
  if (comm->rank() != 0) log_errors_only();
  int code = 0;
  try {
    compare_commands(*comm, command);
    code = body(*comm);
  } catch (const AgreedError& error) {
    if (comm->rank() == 0) log_error(error.what());
    code = static_cast<int>(error.code());
  } catch (...) {
    const Error error = current_error();
    log_error(fmt::format("{} (on rank {} of {})", error.what(), comm->rank(), comm->size()));
    comm->abort(static_cast<int>(error.code()));
  }
  // mpirun ends the others as soon as one leaves with an error: none does before rank 0 has spoken.
  comm->all_gather("");
  return code;
}

int as_one_process(const std::string& command, const std::function<int()>& body) {
  return on_every_rank(command, [&](Comm& comm) {
    if (comm.size() > 1)
      throw AgreedError(Exit::usage,
                        fmt::format("[usage] {}: is one process, started as {} ranks", command, comm.size()));
    return body();
  });
}

int usage_error(const std::string& message) {
  return on_every_rank(message, [&](Comm&) -> int { throw AgreedError(Exit::usage, message); });
}

}  // namespace rownorm
