// Memory of the backends that compute on the host.
#pragma once
#include <cstdint>
#include <string>

#include "ops/backend.h"

namespace rownorm {

// `bytes` of zeroed memory, page-aligned and already touched, so that a shortage shows now and not as a kill in the
// middle of a run. Error (exit 5) with the figures when there is not as much for each of the `processes` of this
// machine that ask at once; `device` is named in the message.
Memory allocate_host_memory(const std::string& device, std::int64_t bytes, int processes);

}  // namespace rownorm
