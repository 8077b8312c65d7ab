#include "train/signals.h"

#include <atomic>
#include <csignal>
#include <initializer_list>

namespace rownorm {
namespace {

std::atomic<int> received = 0;  // a handler runs on any thread
static_assert(std::atomic<int>::is_always_lock_free);

extern "C" void remember_signal(int number) {
  int none = 0;
  received.compare_exchange_strong(none, number);
}

}  // namespace

void catch_stop_signals() {
  for (const int number : {SIGINT, SIGTERM, SIGUSR1}) {
    struct sigaction action {};
    action.sa_handler = remember_signal;
    action.sa_flags = static_cast<int>(SA_RESTART | SA_RESETHAND);
    sigaction(number, &action, nullptr);
  }
}

int stop_signal() { return received; }

}  // namespace rownorm
