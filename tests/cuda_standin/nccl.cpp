// NCCL over MPI. A collective is work of its stream: in lazy mode it is made when the host waits for it. It ends when
// all ranks have come to it, or when the communicator is aborted; ranks that do not come to the same one wait for ever,
// as they may in NCCL. Sums are made in the dtype, rank by rank in a ring that begins behind the root; minima and
// maxima drop NaNs, as NCCL does not promise otherwise. Stream work runs in the thread that waits, which leaves the
// runtime to other threads meanwhile, as a device would.
#include <cuda_bf16.h>
#include <mpi.h>
#include <nccl.h>
#include <sched.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <type_traits>
#include <vector>

#include "engine.h"

struct ncclComm {
  MPI_Comm ranks = MPI_COMM_NULL;
  int rank = 0, size = 1;
  std::atomic<bool> aborted = false;
  std::atomic<int> calls = 0;  // of collectives
  int reduces = 0;             // of ncclReduce
};

namespace {

struct Call {
  enum Kind : int { reduce, broadcast, all_reduce } kind;
  int root;
  ncclDataType_t type;
  ncclRedOp_t how;
  std::size_t count;
};

std::size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclFloat32:
      return 4;
    case ncclInt64:
    case ncclFloat64:
      return 8;
    default:
      standin::stop("NCCL: the stand-in does not know type %d", static_cast<int>(type));
  }
}

// False when the communicator was aborted first.
bool end(const ncclComm& comm, MPI_Request request) {
  for (int done = 0; done == 0;) {
    if (comm.aborted) return false;
    MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    if (done == 0) sched_yield();
  }
  return true;
}

template <class T>
T combine(T a, T b, ncclRedOp_t how) {
  if (how == ncclSum) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>)
      return __float2bfloat16_rn(__bfloat162float(a) + __bfloat162float(b));
    else
      return static_cast<T>(a + b);
  }
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    standin::stop("NCCL: the stand-in has no minimum or maximum of bf16");
  } else if constexpr (std::is_floating_point_v<T>) {
    return how == ncclMax ? std::fmax(a, b) : std::fmin(a, b);
  } else {
    return how == ncclMax ? (a < b ? b : a) : (b < a ? b : a);
  }
}

template <class T>
void combine_all(char* to, const std::vector<char>& of_all, const Call& call, int first, int ranks) {
  const std::size_t bytes = call.count * sizeof(T);
  const auto value = [&](int r, std::size_t i) {
    T x;
    std::memcpy(&x, of_all.data() + static_cast<std::size_t>((first + r) % ranks) * bytes + i * sizeof(T), sizeof x);
    return x;
  };
  for (std::size_t i = 0; i < call.count; ++i) {
    T all = value(0, i);
    for (int r = 1; r < ranks; ++r) all = combine(all, value(r, i), call.how);
    std::memcpy(to + i * sizeof(T), &all, sizeof all);
  }
}

// All ranks are at the same collective, or wait until the communicator is aborted.
bool meet(const ncclComm& comm, const Call& call) {
  std::vector<Call> calls(static_cast<std::size_t>(comm.size));
  MPI_Request request = MPI_REQUEST_NULL;
  MPI_Iallgather(&call, sizeof call, MPI_BYTE, calls.data(), sizeof call, MPI_BYTE, comm.ranks, &request);
  if (!end(comm, request)) return false;
  for (const Call& other : calls)
    while (std::memcmp(&other, &call, sizeof call) != 0) {
      if (comm.aborted) return false;
      sched_yield();
    }
  return true;
}

void exchange(const ncclComm& comm, const Call& call, char* data) {
  if (!meet(comm, call)) return;
  const std::size_t bytes = call.count * size_of(call.type);
  MPI_Request request = MPI_REQUEST_NULL;
  if (call.kind == Call::broadcast) {
    MPI_Ibcast(data, static_cast<int>(bytes), MPI_BYTE, call.root, comm.ranks, &request);
    end(comm, request);
    return;
  }
  std::vector<char> of_all(bytes * static_cast<std::size_t>(comm.size));
  MPI_Iallgather(data, static_cast<int>(bytes), MPI_BYTE, of_all.data(), static_cast<int>(bytes), MPI_BYTE, comm.ranks,
                 &request);
  if (!end(comm, request)) return;
  if (call.kind == Call::reduce && comm.rank != call.root) return;
  const int first = call.kind == Call::reduce ? call.root + 1 : 0;
  if (call.type == ncclFloat64) combine_all<double>(data, of_all, call, first, comm.size);
  if (call.type == ncclFloat32) combine_all<float>(data, of_all, call, first, comm.size);
  if (call.type == ncclInt32) combine_all<std::int32_t>(data, of_all, call, first, comm.size);
  if (call.type == ncclInt64) combine_all<std::int64_t>(data, of_all, call, first, comm.size);
  if (call.type == ncclBfloat16) combine_all<__nv_bfloat16>(data, of_all, call, first, comm.size);
}

ncclResult_t enqueue(ncclComm_t comm, Call call, const void* from, void* to, cudaStream_t stream) {
  const std::lock_guard<std::recursive_mutex> held(standin::lock());
  if (from != to) standin::stop("NCCL: the stand-in works in place only");
  const standin::Region region = standin::find(to);
  if (region.place != standin::Place::device || call.count * size_of(call.type) > region.left)
    standin::stop("NCCL: %zu elements of type %d at %p, which is not as much device memory", call.count,
                  static_cast<int>(call.type), to);
  if (comm->aborted) return ncclInvalidUsage;
  const int number = ++comm->calls;
  if (number == standin::mode().skip) return ncclSuccess;
  const bool twice = call.kind == Call::reduce && ++comm->reduces == standin::mode().twice;
  const bool flip = number == standin::mode().flip;
  standin::enqueue_work(stream, [=] {
    standin::lock().unlock();
    for (int i = 0; i < (twice ? 2 : 1); ++i) exchange(*comm, call, static_cast<char*>(to));
    if (flip) *static_cast<char*>(to) ^= 1;
    standin::lock().lock();
  });
  return ncclSuccess;
}

}  // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::random_device random;
  for (char& c : id->internal) c = static_cast<char>(random());
  return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t* made, int size, ncclUniqueId id, int rank) {
  auto* comm = new ncclComm;
  MPI_Comm_dup(MPI_COMM_WORLD, &comm->ranks);
  MPI_Comm_rank(comm->ranks, &comm->rank);
  MPI_Comm_size(comm->ranks, &comm->size);
  std::vector<ncclUniqueId> ids(static_cast<std::size_t>(comm->size));
  MPI_Allgather(&id, sizeof id, MPI_BYTE, ids.data(), sizeof id, MPI_BYTE, comm->ranks);
  for (const ncclUniqueId& other : ids)
    if (std::memcmp(&other, &id, sizeof id) != 0) standin::stop("NCCL: the ranks have different ids");
  if (comm->rank != rank || comm->size != size) standin::stop("NCCL: rank %d of %d is wrong", rank, size);
  standin::count_handle(1);
  *made = comm;
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  const int from = standin::mode().async_error;
  *error = from > 0 && comm->calls >= from ? ncclRemoteError : ncclSuccess;
  return ncclSuccess;
}

// Another thread may wait for a collective and look at the communicator yet, so it is never given back.
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  comm->aborted = true;
  standin::count_handle(-1);
  return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  MPI_Comm_free(&comm->ranks);
  delete comm;
  standin::count_handle(-1);
  return ncclSuccess;
}

ncclResult_t ncclReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t how, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  return enqueue(comm, {Call::reduce, root, type, how, count}, from, to, stream);
}

ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  return enqueue(comm, {Call::broadcast, root, type, ncclSum, count}, from, to, stream);
}

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t how,
                           ncclComm_t comm, cudaStream_t stream) {
  return enqueue(comm, {Call::all_reduce, 0, type, how, count}, from, to, stream);
}

const char* ncclGetErrorString(ncclResult_t result) { return result == ncclSuccess ? "no error" : "NCCL error"; }

}  // extern "C"
