// Ranks over MPI, for tensors in the host's memory. What is added is added here, not by MPI: then the order is fixed
// for any library, algorithm and topology, NaN is never dropped by a minimum, and bf16 needs no type of MPI's. Every
// call is blocking: MPI progresses only inside its own calls, so on the CPU nothing would overlap.
#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <limits>

#include "base/bf16.h"
#include "comm/comm.h"

namespace rownorm {
namespace {

constexpr std::int64_t buffer_bytes = 8 << 20;    // for what is gathered of all ranks at a time
constexpr std::int64_t message_bytes = 16 << 20;  // MPI counts in an int

void check(int code, const char* what) {
  if (code == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  fail(Exit::device, "[mpi] {}: {}", what, text.data());
}

// to[i] = the sum, minimum or maximum over the ranks r of gathered[r * n + i].
template <class T, class Load, class Store>
void combine(void* to, const std::byte* gathered, std::int64_t n, int ranks, Reduction how, Load load, Store store) {
  const T* values = reinterpret_cast<const T*>(gathered);
  T* result = static_cast<T*>(to);
  for (std::int64_t i = 0; i < n; ++i) {
    double all = load(values[i]);
    for (int r = 1; r < ranks; ++r) {
      const double value = load(values[r * n + i]);
      if (how == Reduction::sum)
        all += value;
      else if (std::isnan(value) || (how == Reduction::max ? value > all : value < all))
        all = value;  // a NaN stays: it compares false
    }
    result[i] = store(all);
  }
}

void combine(void* to, const std::byte* gathered, DType dtype, std::int64_t n, int ranks, Reduction how) {
  const auto same = [](auto x) { return static_cast<double>(x); };
  switch (dtype) {
    case DType::f64:
      return combine<double>(to, gathered, n, ranks, how, same, [](double x) { return x; });
    case DType::f32:
      return combine<float>(to, gathered, n, ranks, how, same, [](double x) { return static_cast<float>(x); });
    case DType::i32:
      return combine<std::int32_t>(to, gathered, n, ranks, how, same,
                                   [](double x) { return static_cast<std::int32_t>(x); });
    case DType::bf16:
      return combine<std::uint16_t>(to, gathered, n, ranks, how, from_bf16,
                                    [](double x) { return to_bf16(static_cast<float>(x)); });
    case DType::u8:
      break;
  }
  throw std::logic_error(fmt::format("[mpi] {} is not reduced", name_of(dtype)));
}

// Ranks meet when MPI is initialised. If one is not this program, or died in its launcher's hands, the others would
// wait for ever.
constexpr unsigned meeting_seconds = 120;

extern "C" void give_up(int) {
  static constexpr char line[] =
      "[mpi] the ranks did not meet within 120 s: one has died, or does not run this program\n";
  (void)!write(STDERR_FILENO, line, sizeof line - 1);
  _exit(static_cast<int>(Exit::device));
}

class Mpi final : public Comm {
 public:
  Mpi() {
    std::signal(SIGALRM, give_up);
    alarm(meeting_seconds);
    // One thread at a time exchanges; another may call abort().
    check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &thread_level_), "MPI_Init_thread");
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    check(MPI_Comm_rank(MPI_COMM_WORLD, &rank_), "MPI_Comm_rank");
    check(MPI_Comm_size(MPI_COMM_WORLD, &size_), "MPI_Comm_size");
    MPI_Comm machine = MPI_COMM_NULL;
    check(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &machine),
          "MPI_Comm_split_type");
    MPI_Comm_rank(machine, &local_rank_);
    MPI_Comm_size(machine, &local_size_);
    MPI_Comm_free(&machine);
    alarm(0);
    chunk_bytes_ = std::max<std::int64_t>(buffer_bytes / size_ / 8 * 8, 4096);
    gathered_.resize(static_cast<std::size_t>(size_ * chunk_bytes_));
  }
  Mpi(const Mpi&) = delete;
  Mpi& operator=(const Mpi&) = delete;
  ~Mpi() override { MPI_Finalize(); }

  // "Open MPI v4.1.4", the first words of a long line.
  std::string description() const override {
    std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> text{};
    int length = 0;
    check(MPI_Get_library_version(text.data(), &length), "MPI_Get_library_version");
    const std::string line = text.data();
    return line.substr(0, line.find_first_of(",\n"));
  }
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  int local_rank() const override { return local_rank_; }
  int local_size() const override { return local_size_; }

  void all_reduce(Tensor t, Reduction how) override {
    for_chunks(t, chunk_bytes_, [&](std::byte* data, std::int64_t bytes) {
      check(MPI_Allgather(data, static_cast<int>(bytes), MPI_BYTE, gathered_.data(), static_cast<int>(bytes), MPI_BYTE,
                          MPI_COMM_WORLD),
            "MPI_Allgather");
      combine(data, gathered_.data(), t.dtype, bytes / size_of(t.dtype), size_, how);
    });
  }

  Ticket start_reduce(Tensor t, int owner, std::string_view) override {
    for_chunks(t, chunk_bytes_, [&](std::byte* data, std::int64_t bytes) {
      check(MPI_Gather(data, static_cast<int>(bytes), MPI_BYTE, gathered_.data(), static_cast<int>(bytes), MPI_BYTE,
                       owner, MPI_COMM_WORLD),
            "MPI_Gather");
      if (rank_ == owner) combine(data, gathered_.data(), t.dtype, bytes / size_of(t.dtype), size_, Reduction::sum);
    });
    return 0;
  }

  Ticket start_broadcast(Tensor t, int owner, std::string_view) override {
    for_chunks(t, message_bytes, [&](std::byte* data, std::int64_t bytes) {
      check(MPI_Bcast(data, static_cast<int>(bytes), MPI_BYTE, owner, MPI_COMM_WORLD), "MPI_Bcast");
    });
    return 0;
  }

  void wait(Ticket) override {}

  std::vector<std::string> all_gather(const std::string& text) override {
    const auto ranks = static_cast<std::size_t>(size_);
    std::vector<int> sizes(ranks), offsets(ranks);
    const int mine = static_cast<int>(text.size());
    check(MPI_Allgather(&mine, 1, MPI_INT, sizes.data(), 1, MPI_INT, MPI_COMM_WORLD), "MPI_Allgather");
    std::int64_t total = 0;
    for (std::size_t r = 0; r < ranks; ++r) {
      offsets[r] = static_cast<int>(total);
      total += sizes[r];
    }
    if (total > std::numeric_limits<int>::max()) throw std::logic_error("[mpi] texts of more than 2 GiB");
    std::string all(static_cast<std::size_t>(total), '\0');
    check(
        MPI_Allgatherv(text.data(), mine, MPI_CHAR, all.data(), sizes.data(), offsets.data(), MPI_CHAR, MPI_COMM_WORLD),
        "MPI_Allgatherv");
    std::vector<std::string> texts;
    for (std::size_t r = 0; r < ranks; ++r)
      texts.push_back(all.substr(static_cast<std::size_t>(offsets[r]), static_cast<std::size_t>(sizes[r])));
    return texts;
  }

  void transfer(void* host, std::int64_t bytes, int from, int to) override {
    if (from == to) return;
    for (std::int64_t first = 0; first < bytes; first += message_bytes) {
      std::byte* data = static_cast<std::byte*>(host) + first;
      const int count = static_cast<int>(std::min(message_bytes, bytes - first));
      if (rank_ == from) check(MPI_Send(data, count, MPI_BYTE, to, 0, MPI_COMM_WORLD), "MPI_Send");
      if (rank_ == to) check(MPI_Recv(data, count, MPI_BYTE, from, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE), "MPI_Recv");
    }
  }

  void abort(int code) override {
    int main_thread = 1;
    if (thread_level_ < MPI_THREAD_MULTIPLE) MPI_Is_thread_main(&main_thread);
    if (main_thread != 0) MPI_Abort(MPI_COMM_WORLD, code);  // else the launcher sees that this rank has ended
    std::_Exit(code);
  }

 private:
  template <class Each>
  static void for_chunks(const Tensor& t, std::int64_t most, Each each) {
    for (std::int64_t first = 0; first < t.bytes(); first += most)
      each(static_cast<std::byte*>(t.data) + first, std::min(most, t.bytes() - first));
  }

  int thread_level_ = MPI_THREAD_SINGLE;
  int rank_ = 0, size_ = 1, local_rank_ = 0, local_size_ = 1;
  std::int64_t chunk_bytes_ = 0;     // of each rank, a multiple of every element's size
  std::vector<std::byte> gathered_;  // (ranks, chunk)
};

}  // namespace

std::unique_ptr<Comm> make_mpi() { return std::make_unique<Mpi>(); }

}  // namespace rownorm
