// Ranks over NCCL. One communicator and one stream carry everything, so that all ranks issue the collectives in one
// order; events tie it to the compute stream. A thread watches over what is under way. libnccl is opened when it is
// first needed: a machine with one GPU need not have it.
#include "cuda/nccl_comm.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <nccl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <thread>
#include <type_traits>
#include <vector>

#include "base/error.h"
#include "cuda/ordered.h"

namespace rownorm::cuda {
namespace {

using Clock = std::chrono::steady_clock;
using Report = std::function<void(const std::string&)>;

struct Library {
  decltype(&ncclGetVersion) get_version;
  decltype(&ncclGetUniqueId) get_unique_id;
  decltype(&ncclCommInitRank) init_rank;
  decltype(&ncclCommGetAsyncError) get_async_error;
  decltype(&ncclCommAbort) abort;
  decltype(&ncclCommDestroy) destroy;
  decltype(&ncclReduce) reduce;
  decltype(&ncclBroadcast) broadcast;
  decltype(&ncclAllReduce) all_reduce;
  decltype(&ncclGetErrorString) error_string;
};

// Versions from 2.9 on count as major * 10000 + minor * 100 + patch, those before as major * 1000 + ... (nccl.h).
int version_of(const Library& library) {
  int version = 0;
  if (library.get_version(&version) != ncclSuccess) fail(Exit::device, "[nccl] libnccl.so.2: does not say its version");
  return version;
}

std::string version_text(int version) {
  const int major = version < 10000 ? 1000 : 10000;
  return fmt::format("{}.{}.{}", version / major, version % major / 100, version % 100);
}

const Library& library() {
  static const Library loaded = [] {
    void* handle = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (!handle)
      fail(Exit::device, "[nccl] {}; several GPUs need it, beside the executable or in LD_LIBRARY_PATH", dlerror());
    const auto find = [handle](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
      if (!function) fail(Exit::device, "[nccl] libnccl.so.2: has no {}", name);
    };
    Library l{};
    find(l.get_version, "ncclGetVersion");
    find(l.get_unique_id, "ncclGetUniqueId");
    find(l.init_rank, "ncclCommInitRank");
    find(l.get_async_error, "ncclCommGetAsyncError");
    find(l.abort, "ncclCommAbort");
    find(l.destroy, "ncclCommDestroy");
    find(l.reduce, "ncclReduce");
    find(l.broadcast, "ncclBroadcast");
    find(l.all_reduce, "ncclAllReduce");
    find(l.error_string, "ncclGetErrorString");
    if (const int version = version_of(l); version < 21000)  // the first with bf16
      fail(Exit::device, "[nccl] libnccl.so.2: is version {}, 2.10 or newer is needed", version_text(version));
    return l;
  }();
  return loaded;
}

void check(ncclResult_t status, const std::string& what) {
  if (status != ncclSuccess) fail(Exit::device, "[nccl] {}: {}", what, library().error_string(status));
}

ncclDataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return ncclFloat64;
    case DType::f32:
      return ncclFloat32;
    case DType::bf16:
      return ncclBfloat16;
    case DType::i32:
      return ncclInt32;
    case DType::u8:
      break;
  }
  throw std::logic_error(fmt::format("[nccl] {} is not exchanged", name_of(dtype)));
}

// Bytes as text, for what is exchanged as text.
template <class Bytes>
std::string hex(const Bytes& bytes) {
  std::string text;
  for (std::size_t i = 0; i < sizeof bytes; ++i)
    text += fmt::format("{:02x}", reinterpret_cast<const unsigned char*>(&bytes)[i]);
  return text;
}

// A collective from the moment the host turns to it until it is done.
struct Flight {
  Comm::Ticket ticket;
  const char* kind;  // "reduce"
  std::string what;  // "blocks.3"
  std::int64_t update;
  cudaEvent_t ready, done;  // of the compute stream, which it waits for; of its own
  bool enqueued = false;    // both are recorded; until then the host is inside NCCL
  // When it was first seen that nothing but the other ranks keeps it from ending.
  std::optional<Clock::time_point> since{};
};

class NcclComm final : public Comm {
 public:
  NcclComm(Comm& ranks, const CudaBackend& backend, double timeout_seconds, Report report)
      : ranks_(ranks),
        device_(backend.device()),
        compute_(backend.stream()),
        timeout_(timeout_seconds),
        report_(std::move(report)) {
    ncclUniqueId id{};
    together(ranks, [&] {
      static_cast<void>(library());
      if (ranks.rank() == 0) check(library().get_unique_id(&id), "ncclGetUniqueId");
    });
    require_different_devices(backend.properties());
    const std::string text = from_first_rank(ranks, hex(id));
    for (std::size_t i = 0; i < sizeof id; ++i)
      reinterpret_cast<unsigned char*>(&id)[i] =
          static_cast<unsigned char>(std::stoi(text.substr(2 * i, 2), nullptr, 16));
    together(ranks, [&] {
      int least = 0, greatest = 0;  // an exchange that has begun goes before computing that it holds up elsewhere
      cuda::check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
      cuda::check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest), "cudaStreamCreate");
    });
    watchdog_ = std::thread([this] { watch(); });
    try {
      together(ranks, [&] {
        ncclComm_t comm = nullptr;
        start("initialisation", {}, [&] { return library().init_rank(&comm, ranks_.size(), id, ranks_.rank()); });
        const std::lock_guard<std::mutex> held(mutex_);
        comm_ = comm;
      });
    } catch (...) {
      stop(false);
      throw;
    }
  }
  NcclComm(const NcclComm&) = delete;
  NcclComm& operator=(const NcclComm&) = delete;

  // After an error the other ranks may never come to what is under way.
  ~NcclComm() override {
    const bool well = std::uncaught_exceptions() == 0;
    if (well) {
      park_if_failed();
      cudaStreamSynchronize(stream_);
      look();
    }
    stop(well);
  }

  std::string description() const override { return "NCCL " + version_text(version_of(library())); }
  int rank() const override { return ranks_.rank(); }
  int size() const override { return ranks_.size(); }
  int local_rank() const override { return ranks_.local_rank(); }
  int local_size() const override { return ranks_.local_size(); }

  void begin_update(std::int64_t update) override {
    look();
    update_ = update;
  }

  void all_reduce(Tensor t, Reduction how) override {
    if (t.size() == 0) return;
    const bool sum = how == Reduction::sum, ordered = !sum && t.dtype != DType::i32;
    if (ordered && t.dtype != DType::f64 && t.dtype != DType::f32)
      throw std::logic_error(fmt::format("[nccl] no minimum or maximum of {}", name_of(t.dtype)));
    const ncclDataType_t type = !ordered ? type_of(t.dtype) : t.dtype == DType::f64 ? ncclInt64 : ncclInt32;
    if (ordered) to_ordered(t, how == Reduction::max, compute_);
    wait(start("all-reduce", t.str(), [&] {
      return library().all_reduce(t.data, t.data, count(t), type,
                                  sum                     ? ncclSum
                                  : how == Reduction::max ? ncclMax
                                                          : ncclMin,
                                  comm_, stream_);
    }));
    if (ordered) from_ordered(t, compute_);
  }

  Ticket start_reduce(Tensor t, int owner, std::string_view what) override {
    if (t.size() == 0) return done_already;
    return start("reduce", fmt::format("{} to rank {}", what, owner), [&] {
      return library().reduce(t.data, t.data, count(t), type_of(t.dtype), ncclSum, owner, comm_, stream_);
    });
  }

  Ticket start_broadcast(Tensor t, int owner, std::string_view what) override {
    if (t.size() == 0) return done_already;
    return start("broadcast", fmt::format("{} from rank {}", what, owner), [&] {
      return library().broadcast(t.data, t.data, count(t), type_of(t.dtype), owner, comm_, stream_);
    });
  }

  void wait(Ticket ticket) override {
    park_if_failed();
    const std::lock_guard<std::mutex> held(mutex_);
    retire();
    if (flights_.empty() || ticket < flights_.front().ticket) return;  // done
    const auto index = static_cast<std::size_t>(ticket - flights_.front().ticket);
    if (index >= flights_.size()) throw std::logic_error(fmt::format("[nccl] no ticket {}", ticket));
    cuda::check(cudaStreamWaitEvent(compute_, flights_[index].done, 0), "cudaStreamWaitEvent");
  }

  // On the host. First what is under way on the device: so no two ranks wait for each other, one here and one there,
  // which NCCL warns of where MPI uses the device as well ("NCCL and MPI", Inter-GPU Communication).
  std::vector<std::string> all_gather(const std::string& text) override {
    drain();
    return ranks_.all_gather(text);
  }
  void transfer(void* host, std::int64_t bytes, int from, int to) override {
    drain();
    ranks_.transfer(host, bytes, from, to);
  }
  void abort(int code) override { ranks_.abort(code); }

 private:
  static constexpr Ticket done_already = 0;

  static std::size_t count(const Tensor& t) { return static_cast<std::size_t>(t.size()); }

  // NCCL would find out too, but say less.
  void require_different_devices(const cudaDeviceProp& p) {
    std::array<char, 256> host{};
    gethostname(host.data(), host.size() - 1);
    const auto names = ranks_.all_gather(hex(p.uuid));
    const auto where =
        ranks_.all_gather(fmt::format("device {} of {} ({}, UUID {})", device_, host.data(), p.name, hex(p.uuid)));
    for (std::size_t r = 0; r < names.size(); ++r)
      for (std::size_t s = 0; s < r; ++s)
        if (names[r] == names[s])
          throw AgreedError(Exit::device, fmt::format("[nccl] ranks {} and {} are both on {}; one GPU a rank is needed",
                                                      s, r, where[r]));
  }

  // Enqueues what `call` does behind the work enqueued so far.
  template <class Call>
  Ticket start(const char* kind, std::string what, Call call) {
    park_if_failed();
    Flight* flight = nullptr;
    {
      const std::lock_guard<std::mutex> held(mutex_);
      retire();
      const auto [ready, done] = take_events();
      flights_.push_back({++last_, kind, std::move(what), update_, ready, done, false, Clock::now()});
      flight = &flights_.back();  // stays where it is until it is done
    }
    cuda::check(cudaEventRecord(flight->ready, compute_), "cudaEventRecord");
    cuda::check(cudaStreamWaitEvent(stream_, flight->ready, 0), "cudaStreamWaitEvent");
    const ncclResult_t result = call();
    park_if_failed();  // an aborted communicator
    check(result, describe(*flight));
    cuda::check(cudaEventRecord(flight->done, stream_), "cudaEventRecord");
    const std::lock_guard<std::mutex> held(mutex_);
    flight->enqueued = true;
    flight->since.reset();
    return flight->ticket;
  }

  void drain() {
    park_if_failed();
    cuda::check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    look();
  }

  // ---- under mutex_ ----

  std::array<cudaEvent_t, 2> take_events() {
    std::array<cudaEvent_t, 2> events{};
    if (!free_.empty()) {
      events = free_.back();
      free_.pop_back();
      return events;
    }
    for (cudaEvent_t& event : events) {
      cuda::check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
      events_.push_back(event);
    }
    return events;
  }

  // Lets go of what is done. A stream is in order: whoever waited for it saw it.
  void retire() {
    while (!flights_.empty() && flights_.front().enqueued && cudaEventQuery(flights_.front().done) == cudaSuccess) {
      free_.push_back({flights_.front().ready, flights_.front().done});
      flights_.pop_front();
    }
  }

  // What is wrong with the collective that the stream is at; "" for nothing.
  std::string problem() {
    ncclResult_t error = ncclSuccess;
    if (comm_ && library().get_async_error(comm_, &error) == ncclSuccess && error != ncclSuccess &&
        error != ncclInProgress)
      return library().error_string(error);
    if (flights_.empty()) return "";
    Flight& first = flights_.front();
    const cudaError_t ready = first.enqueued ? cudaEventQuery(first.ready) : cudaSuccess;
    if (ready != cudaSuccess && ready != cudaErrorNotReady) return cudaGetErrorString(ready);
    if (ready == cudaSuccess && !first.since) first.since = Clock::now();
    if (!first.since || Clock::now() - *first.since < std::chrono::duration<double>(timeout_)) return "";
    return fmt::format("not done after {:g} s (comm.timeout_seconds): another rank is late, has died or left it out",
                       timeout_);
  }

  void find_wrong() {
    retire();
    const std::string wrong = problem();
    if (wrong.empty()) return;
    wrong_ = fmt::format("[nccl] {}: {} (on rank {} of {})",
                         flights_.empty() ? "between collectives" : describe(flights_.front()), wrong, ranks_.rank(),
                         ranks_.size());
  }

  static std::string describe(const Flight& f) {
    return fmt::format("{}{}, {}{}", f.kind, f.what.empty() ? "" : " of " + f.what,
                       f.update > 0 ? "update " : "before the first update",
                       f.update > 0 ? fmt::format("{}", f.update) : "");
  }

  // ---- the watchdog ----

  void watch() {
    cudaSetDevice(device_);
    const auto period = std::chrono::duration<double>(std::clamp(timeout_ / 20, 0.01, 1.0));
    std::unique_lock<std::mutex> lock(mutex_);
    while (wrong_.empty()) {
      if (wake_.wait_for(lock, period, [this] { return stopping_ || !wrong_.empty(); }) && stopping_) return;
      if (wrong_.empty()) find_wrong();
    }
    const std::string line = wrong_;
    lock.unlock();
    report_(line);
    std::this_thread::sleep_for(std::chrono::seconds(2));  // the other ranks say where they are
    // Aborting ends kernels that wait, but has been known to hang itself. No sooner: the thread that computes may wait
    // for the device, and would go on with what is not there.
    if (comm_) std::thread([comm = comm_] { library().abort(comm); }).detach();
    ranks_.abort(static_cast<int>(Exit::device));
  }

  // What an aborted collective left is nobody's result: the thread that computes goes no further.
  void park_if_failed() {
    std::unique_lock<std::mutex> lock(mutex_);
    if (wrong_.empty()) return;
    lock.unlock();
    for (;;) pause();
  }

  // Where the host is between two updates or waits anyway, it does not rely on the watchdog's having come by: a run
  // shorter than its period would end well with a communicator that failed.
  void look() {
    {
      const std::lock_guard<std::mutex> held(mutex_);
      if (wrong_.empty()) find_wrong();
    }
    wake_.notify_all();
    park_if_failed();
  }

  void stop(bool well) {
    {
      const std::lock_guard<std::mutex> held(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    watchdog_.join();
    if (comm_) well ? library().destroy(comm_) : library().abort(comm_);
    cudaStreamSynchronize(stream_);
    for (const cudaEvent_t event : events_) cudaEventDestroy(event);
    cudaStreamDestroy(stream_);
  }

  Comm& ranks_;
  int device_;
  cudaStream_t compute_, stream_ = nullptr;
  double timeout_;  // s
  Report report_;
  std::int64_t update_ = 0;

  std::mutex mutex_;  // over what follows
  ncclComm_t comm_ = nullptr;
  std::deque<Flight> flights_;  // in the order of the stream, which is that of the tickets
  Ticket last_ = done_already;
  std::vector<std::array<cudaEvent_t, 2>> free_;
  std::vector<cudaEvent_t> events_;  // all
  std::string wrong_;                // the line that says why the communicator is given up; "" while it is well
  bool stopping_ = false;
  std::condition_variable wake_;
  std::thread watchdog_;
};

}  // namespace

std::unique_ptr<Comm> make_nccl_comm(Comm& ranks, const CudaBackend& backend, double timeout_seconds,
                                     const Report& report) {
  return std::make_unique<NcclComm>(ranks, backend, timeout_seconds, report);
}

}  // namespace rownorm::cuda
