// SIGINT, SIGTERM and SIGUSR1 ask a run to stop after the update under way; the same signal a second time ends the
// process at once.
#pragma once

namespace rownorm {

void catch_stop_signals();
int stop_signal();  // the first one received, or 0

}  // namespace rownorm
