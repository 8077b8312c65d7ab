// How ranks agree on errors.
#include <algorithm>

#include "comm/comm.h"

namespace rownorm {

void together(Comm& comm, const std::function<void()>& local) {
  if (comm.size() == 1) return local();
  std::string mine;  // "<exit code> <message>" of this rank's error, "" without one
  try {
    local();
  } catch (...) {
    const Error error = current_error();
    mine = fmt::format("{} {}", static_cast<int>(error.code()), error.what());
  }
  const auto errors = comm.all_gather(mine);
  const auto first = std::ranges::find_if(errors, [](const std::string& text) { return !text.empty(); });
  if (first == errors.end()) return;
  const std::size_t space = first->find(' ');
  const auto rank = first - errors.begin();
  throw AgreedError(
      static_cast<Exit>(std::stoi(first->substr(0, space))),
      first->substr(space + 1) + (rank == 0 ? "" : fmt::format(" (on rank {} of {})", rank, comm.size())));
}

void on_first_rank(Comm& comm, const std::function<void()>& work) {
  together(comm, [&] {
    if (comm.rank() == 0) work();
  });
}

std::string from_first_rank(Comm& comm, const std::string& text) {
  return comm.all_gather(comm.rank() == 0 ? text : "").front();
}

}  // namespace rownorm
