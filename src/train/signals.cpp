#include "train/signals.h"

#include <csignal>
#include <initializer_list>

namespace rownorm {
namespace {

volatile std::sig_atomic_t received = 0;

extern "C" void remember_signal(int number) {
  if (received == 0) received = number;
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
