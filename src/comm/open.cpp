// Which ranks there are.
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
      Variables{"torchrun", "RANK", "WORLD_SIZE"},  // gives MPI nothing: refused below
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

}  // namespace rownorm
