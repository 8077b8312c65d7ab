// Stands in for mpi.cpp in a build without MPI.
#include "comm/comm.h"

namespace rownorm {

std::unique_ptr<Comm> make_mpi() {
  fail(Exit::device,
       "[mpi] this program was built without MPI and runs as one process; install an MPI (Debian: "
       "libopenmpi-dev) and build again");
}

}  // namespace rownorm
