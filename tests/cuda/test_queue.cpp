// Who may touch the host's memory when, on a device that works as late as it may: in the stand-in's lazy mode work runs
// when the host waits for it, and no more than it must. The tests of the batch reader are part of this program too.
#include <gtest/gtest.h>

#include <cstdlib>
#include <vector>

#include "ops/bench.h"

namespace rownorm {
namespace {

[[maybe_unused]] const int lazy = setenv("ROWNORM_STANDIN", "lazy", 1);  // before the module is opened

// The stand-in's device memory is the host's: what is in it now, whatever is still in the queue. (To the thread
// sanitizer a race with that.)
__attribute__((no_sanitize("thread"))) double now(Tensor scalar) { return *static_cast<const double*>(scalar.data); }

TEST(Queue, WaitingForATicketLeavesLaterWorkInTheQueue) {
  Bench be("cuda_fp32", {});
  const Tensor x = be.scalar(0);
  const Memory host = be->allocate_host(8);
  be->fill(x, 1);
  const auto ticket = be->start_download(host.get(), x);
  be->fill(x, 2);
  EXPECT_EQ(now(x), 0);
  be->wait(ticket);
  EXPECT_EQ(*static_cast<const double*>(host.get()), 1);
  EXPECT_EQ(now(x), 1);
  EXPECT_EQ(be->read(x), 2);
}

// Tickets share events: an old one may be waited for longer than it must, never shorter.
TEST(Queue, EveryOneOfManyTicketsIsWaitedFor) {
  Bench be("cuda_fp32", {});
  constexpr int count = 100;
  const Tensor x = be.scalar(0);
  const Memory host = be->allocate_host(8 * count);
  auto* values = static_cast<double*>(host.get());
  std::vector<Backend::Ticket> tickets;
  for (int i = 0; i < count; ++i) {
    be->fill(x, i + 1);
    tickets.push_back(be->start_download(values + i, x));
    if (i % 3 == 2) {
      be->wait(tickets[static_cast<std::size_t>(i - 2)]);
      EXPECT_EQ(values[i - 2], i - 1);
    }
  }
  for (int i = 0; i < count; ++i) {
    be->wait(tickets[static_cast<std::size_t>(i)]);
    EXPECT_EQ(values[i], i + 1);
  }
  EXPECT_THROW(be->wait(count), std::logic_error);
  EXPECT_THROW(be->wait(-1), std::logic_error);
}

// Where an error ends a run: the memory goes while the device has not yet read it.
TEST(Queue, MemoryGoesOnlyWhenItHasBeenCopied) {
  Bench be("cuda_fp32", {});
  const Tensor x = be.scalar(0);
  {
    const Memory host = be->allocate_host(8);
    *static_cast<double*>(host.get()) = 3;
    be->start_upload(x, host.get());
  }
  EXPECT_EQ(be->read(x), 3);
}

}  // namespace
}  // namespace rownorm
