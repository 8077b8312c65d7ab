// Construction, memory, transport and timing of the CUDA backend, and its matrix products.
#include "cuda/backend.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <deque>
#include <iterator>
#include <stdexcept>

#include "base/error.h"
#include "cuda/nccl_comm.h"
#include "ops/cuda_module.h"

namespace rownorm::cuda {

void check(cudaError_t status, const char* call) {
  if (status != cudaSuccess) fail(Exit::device, "[cuda] {}: {}", call, cudaGetErrorString(status));
}

unsigned grid_size(Index blocks) {
  constexpr Index most = 0x7fffffff;  // gridDim.x (CUDA C++ Programming Guide, "Compute Capabilities")
  if (blocks > most)
    fail(Exit::device, "[cuda] a grid of {} blocks, at most {} are possible: a smaller micro-batch is needed", blocks,
         most);
  return static_cast<unsigned>(blocks);
}

namespace {

// Without a driver the count is left as it was and an error returned.
int find_device(int local_rank) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) fail(Exit::device, "[cuda] no device: {}", cudaGetErrorString(status));
  if (count == 0) fail(Exit::device, "[cuda] no device");
  if (count == 1) return 0;  // a launcher may have given each rank its own; make_nccl looks at which they are
  if (local_rank < 0 || local_rank >= count)
    fail(Exit::device, "[cuda] no device {}: this machine has {}, one a rank is needed", local_rank, count);
  return local_rank;
}

}  // namespace

CudaBackend::CudaBackend(const std::string& precision, int local_rank)
    : device_(find_device(local_rank)),
      precision_(precision),
      compute_(compute_dtype_of(precision)),
      multiply_(precision == "tf32" ? Multiply::tf32 : Multiply::f32) {
  if (precision != "fp32" && precision != "tf32" && precision != "bf16")
    fail(Exit::usage, "[precision] {}: not on device cuda, which has bf16, tf32, fp32", precision);
  check(cudaSetDevice(device_), "cudaSetDevice");
  check(cudaGetDeviceProperties(&properties_, device_), "cudaGetDeviceProperties");
  if (properties_.major < 8)
    fail(Exit::device, "[cuda] {}: compute capability {}.{}, at least 8.0 is needed", properties_.name,
         properties_.major, properties_.minor);
  if (!has_code())
    fail(Exit::device,
         "[cuda] {}: this build has no code for compute capability {}.{}; configure it with "
         "-DCMAKE_CUDA_ARCHITECTURES={}{}-real",
         properties_.name, properties_.major, properties_.minor, properties_.major, properties_.minor);
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  products_ = std::make_unique<Products>(stream_);
  void* staging = nullptr;
  check(cudaMallocHost(&staging, staging_bytes), "cudaMallocHost");
  staging_ = {staging, {cudaFreeHost}};
  for (cudaEvent_t& event : staged_) check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
  for (cudaEvent_t& event : copied_) check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
}

CudaBackend::~CudaBackend() {
  cudaStreamSynchronize(stream_);
  for (const cudaEvent_t event : marks_) cudaEventDestroy(event);
  for (const cudaEvent_t event : staged_)
    if (event) cudaEventDestroy(event);
  for (const cudaEvent_t event : copied_)
    if (event) cudaEventDestroy(event);
  products_.reset();
  cudaStreamDestroy(stream_);
}

std::string CudaBackend::description() const {
  int runtime = 0;
  check(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
  return fmt::format("cuda: {}, compute capability {}.{}, {} SMs, {}, CUDA {}.{}, {}", properties_.name,
                     properties_.major, properties_.minor, properties_.multiProcessorCount,
                     human_bytes(static_cast<Index>(properties_.totalGlobalMem)), runtime / 1000, runtime % 1000 / 10,
                     precision_);
}

// ---- memory ----

Memory CudaBackend::allocate(Index bytes) {
  std::size_t available = 0, total = 0;
  check(cudaMemGetInfo(&available, &total), "cudaMemGetInfo");
  void* memory = nullptr;
  const auto size = static_cast<std::size_t>(std::max<Index>(bytes, 1));
  if (bytes < 0 || size > available || cudaMalloc(&memory, size) != cudaSuccess) {
    cudaGetLastError();  // a failed allocation is no failure of what comes after it
    fail(Exit::device, "[memory] cuda: needs {} ({} bytes), {} of {} available on device {}", human_bytes(bytes), bytes,
         human_bytes(static_cast<Index>(available)), human_bytes(static_cast<Index>(total)), device_);
  }
  Memory owned(memory, [](void* p) { cudaFree(p); });
  check(cudaMemsetAsync(memory, 0, size, stream_), "cudaMemset");
  check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  return owned;
}

Memory CudaBackend::allocate_host(Index bytes) {
  void* memory = nullptr;
  const auto size = static_cast<std::size_t>(std::max<Index>(bytes, 1));
  if (bytes < 0 || cudaMallocHost(&memory, size) != cudaSuccess) {
    cudaGetLastError();
    fail(Exit::device, "[memory] cuda: needs {} ({} bytes) of pinned host memory, which cannot be had",
         human_bytes(bytes), bytes);
  }
  std::memset(memory, 0, size);
  return Memory(memory, [stream = stream_](void* p) {
    cudaStreamSynchronize(stream);  // a copy may be under way, where an error ends a run
    cudaFreeHost(p);
  });
}

Index CudaBackend::workspace_bytes(const WorkspaceSizes& sizes) const { return cuda::workspace_bytes(compute_, sizes); }

void CudaBackend::set_workspace(Tensor workspace, const WorkspaceSizes& sizes) {
  if (workspace.dtype != DType::u8 || workspace.bytes() < workspace_bytes(sizes))
    throw std::logic_error(
        fmt::format("[workspace] {}, expected at least {} u8", workspace.str(), workspace_bytes(sizes)));
  workspace_ = workspace;
  products_->set_workspace(workspace.data);
}

Arena CudaBackend::scratch() const {
  return Arena(static_cast<char*>(workspace_.data) + products_bytes, workspace_.bytes() - products_bytes);
}

// ---- transport: pageable memory of the host passes through pinned pieces, some filled while others travel ----

// The piece used longest ago, when its last journey is over.
CudaBackend::Piece CudaBackend::next_piece() {
  const std::size_t i = next_piece_;
  next_piece_ = (i + 1) % staged_.size();
  check(cudaEventSynchronize(staged_[i]), "cudaEventSynchronize");
  return {static_cast<char*>(staging_.get()) + static_cast<Index>(i) * staging_piece_bytes, staged_[i]};
}

void CudaBackend::do_upload(Tensor to, const void* host) {
  const Index bytes = to.bytes();
  for (Index begin = 0; begin < bytes; begin += staging_piece_bytes) {
    const auto part = static_cast<std::size_t>(std::min(staging_piece_bytes, bytes - begin));
    const Piece piece = next_piece();
    std::memcpy(piece.data, static_cast<const char*>(host) + begin, part);
    check(cudaMemcpyAsync(static_cast<char*>(to.data) + begin, piece.data, part, cudaMemcpyHostToDevice, stream_),
          "cudaMemcpyAsync to the device");
    check(cudaEventRecord(piece.free, stream_), "cudaEventRecord");
  }
}

void CudaBackend::do_download(void* host, Tensor from) {
  const Index bytes = from.bytes();
  std::deque<Piece> travelling;
  Index asked = 0;
  for (Index begin = 0; begin < bytes; begin += staging_piece_bytes) {
    for (; asked < bytes && std::ssize(travelling) < staging_pieces; asked += staging_piece_bytes) {
      const Piece piece = travelling.emplace_back(next_piece());
      check(cudaMemcpyAsync(piece.data, static_cast<const char*>(from.data) + asked,
                            static_cast<std::size_t>(std::min(staging_piece_bytes, bytes - asked)),
                            cudaMemcpyDeviceToHost, stream_),
            "cudaMemcpyAsync from the device");
      check(cudaEventRecord(piece.free, stream_), "cudaEventRecord");
    }
    check(cudaEventSynchronize(travelling.front().free), "cudaEventSynchronize");
    std::memcpy(static_cast<char*>(host) + begin, travelling.front().data,
                static_cast<std::size_t>(std::min(staging_piece_bytes, bytes - begin)));
    travelling.pop_front();
  }
}

CudaBackend::Ticket CudaBackend::copy_started() {
  check(cudaEventRecord(copied_[copies_ % std::ssize(copied_)], stream_), "cudaEventRecord");
  return copies_++;
}

CudaBackend::Ticket CudaBackend::do_start_upload(Tensor to, const void* host) {
  check(cudaMemcpyAsync(to.data, host, static_cast<std::size_t>(to.bytes()), cudaMemcpyHostToDevice, stream_),
        "cudaMemcpyAsync to the device");
  return copy_started();
}

CudaBackend::Ticket CudaBackend::do_start_download(void* host, Tensor from) {
  check(cudaMemcpyAsync(host, from.data, static_cast<std::size_t>(from.bytes()), cudaMemcpyDeviceToHost, stream_),
        "cudaMemcpyAsync from the device");
  return copy_started();
}

void CudaBackend::wait(Ticket ticket) {
  if (ticket < 0 || ticket >= copies_)
    throw std::logic_error(fmt::format("[wait] ticket {}, {} were given out", ticket, copies_));
  check(cudaEventSynchronize(copied_[ticket % std::ssize(copied_)]), "cudaEventSynchronize");
}

// ---- timing ----

Index CudaBackend::mark() {
  const auto slot = static_cast<std::size_t>(marked_ % most_marks);
  if (slot == marks_.size()) {
    cudaEvent_t event = nullptr;
    check(cudaEventCreate(&event), "cudaEventCreate");
    marks_.push_back(event);
  }
  check(cudaEventRecord(marks_[slot], stream_), "cudaEventRecord");
  return marked_++;
}

double CudaBackend::seconds_between(Index from, Index to) {
  for (const Index mark : {from, to})
    if (mark < 0 || mark >= marked_ || mark < marked_ - most_marks)
      throw std::logic_error(fmt::format("[seconds_between] mark {} is none of the last {}", mark, most_marks));
  const auto event = [this](Index mark) { return marks_[static_cast<std::size_t>(mark % most_marks)]; };
  check(cudaEventSynchronize(event(to)), "cudaEventSynchronize");
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, event(from), event(to)), "cudaEventElapsedTime");
  return static_cast<double>(milliseconds) * 1e-3;
}

// ---- linear maps: y = x w^T, dx = dy w, dw += dy^T x ----

void CudaBackend::do_linear(Tensor y, Tensor x, Tensor w, bool accumulate) {
  const Index N = x.dim(0), m = w.dim(0), k = w.dim(1);
  products_->multiply(N, m, k, 1, {x.data, compute_, k}, {w.data, compute_, k, true}, accumulate ? 1 : 0,
                      {y.data, compute_, m}, multiply_);
}

void CudaBackend::do_linear_input_grad(Tensor dx, Tensor dy, Tensor w) {
  const Index N = dx.dim(0), m = w.dim(0), k = w.dim(1);
  products_->multiply(N, k, m, 1, {dy.data, compute_, m}, {w.data, compute_, k}, 0, {dx.data, compute_, k}, multiply_);
}

void CudaBackend::do_linear_weight_grad(Tensor dw, Tensor dy, Tensor x) {
  const Index N = x.dim(0), m = dw.dim(0), k = dw.dim(1);
  products_->multiply(m, k, N, 1, {dy.data, compute_, m, true}, {x.data, compute_, k}, 1, {dw.data, DType::f32, k},
                      multiply_);
}

}  // namespace rownorm::cuda

// ---- the module (ops/cuda_module.h) ----

extern "C" int rownorm_cuda_abi() { return rownorm::cuda_module_abi; }

extern "C" rownorm::Backend* rownorm_cuda_backend(const char* precision, int local_rank, char* message,
                                                  std::size_t size) {
  try {
    return new rownorm::cuda::CudaBackend(precision, local_rank);
  } catch (const std::exception& error) {
    const std::string what = error.what();  // the caller says "[cuda]"
    const std::string prefix = "[cuda] ";
    std::snprintf(message, size, "%s", what.c_str() + (what.starts_with(prefix) ? prefix.size() : 0));
    return nullptr;
  }
}

extern "C" rownorm::Comm* rownorm_cuda_comm(rownorm::Comm* ranks, rownorm::Backend* backend, double timeout_seconds,
                                            const std::function<void(const std::string&)>* report, char* message,
                                            std::size_t size) {
  try {
    const auto& cuda = static_cast<const rownorm::cuda::CudaBackend&>(*backend);
    return rownorm::cuda::make_nccl_comm(*ranks, cuda, timeout_seconds, *report).release();
  } catch (const std::exception& error) {
    std::snprintf(message, size, "%s", error.what());
    return nullptr;
  }
}
