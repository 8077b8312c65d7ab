// Which ranks there are, and how they agree on errors.
#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <string_view>

#include "comm/comm.h"

namespace rownorm {
namespace {

std::optional<int> number_in(const char* variable) {
  const char* value = variable ? std::getenv(variable) : nullptr;
  if (!value) return std::nullopt;
  const std::string_view text = value;
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || number < 0) return std::nullopt;
  return number;
}

}  // namespace

std::optional<Launcher> find_launcher() {
  struct Variables {
    const char *name, *rank, *size;
  };
  static constexpr std::array known{
      Variables{"Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
      Variables{"a PMI launcher (MPICH's or Intel's mpirun, srun --mpi=pmi2)", "PMI_RANK", "PMI_SIZE"},
      Variables{"MVAPICH's mpirun", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"},
      Variables{"srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"},  // the second is not set in a batch script
      Variables{"a PMIx launcher", "PMIX_RANK", nullptr},
  };
  for (const Variables& v : known) {
    const auto rank = number_in(v.rank), size = number_in(v.size);
    if (!rank || (v.size && !size)) continue;
    return Launcher{v.name, v.size ? fmt::format("{}={}", v.size, *size) : fmt::format("{}={}", v.rank, *rank), *rank,
                    size.value_or(0)};
  }
  return std::nullopt;
}

std::unique_ptr<Comm> open_comm() {
  const auto launcher = find_launcher();
  if (!launcher || launcher->size == 1) return make_single_process();
  auto comm = make_mpi();
  if (comm->size() == 1 && launcher->size > 1)
    fail(Exit::device,
         "[mpi] {} started {} processes ({}), but each is rank 0 of 1 to the MPI library of this program; use the "
         "mpirun of the library it is linked with (ldd), or srun with its --mpi type",
         launcher->name, launcher->size, launcher->found);
  return comm;
}

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

std::string from_first_rank(Comm& comm, const std::string& text) {
  return comm.all_gather(comm.rank() == 0 ? text : "").front();
}

}  // namespace rownorm
