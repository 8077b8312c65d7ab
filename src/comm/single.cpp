#include <cstdlib>

#include "comm/comm.h"

namespace rownorm {
namespace {

class SingleProcess final : public Comm {
 public:
  std::string description() const override { return "none"; }
  int rank() const override { return 0; }
  int size() const override { return 1; }
  int local_rank() const override { return 0; }
  int local_size() const override { return 1; }
  void all_reduce(Tensor, Reduction) override {}
  Ticket start_reduce(Tensor, int, std::string_view) override { return 0; }
  Ticket start_broadcast(Tensor, int, std::string_view) override { return 0; }
  void wait(Ticket) override {}
  std::vector<std::string> all_gather(const std::string& text) override { return {text}; }
  void transfer(void*, std::int64_t, int, int) override {}
  void abort(int code) override { std::_Exit(code); }
};

}  // namespace

std::unique_ptr<Comm> make_single_process() { return std::make_unique<SingleProcess>(); }

}  // namespace rownorm
