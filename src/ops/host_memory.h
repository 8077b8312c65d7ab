// Memory of the backends that compute on the host.
#pragma once
#include <cstdint>
#include <string>

#include "ops/backend.h"

namespace rownorm {

// `bytes` of zeroed memory, page-aligned and already touched, so that a shortage shows now and not as a kill in the
// middle of a run. Error (exit 5) with the figures when there is not as much; `device` is named in the message.
Memory allocate_host_memory(const std::string& device, std::int64_t bytes);

}  // namespace rownorm
