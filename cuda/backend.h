// The CUDA backend: one device, one stream, f32 masters; activations and products in f32, in tf32 or in bf16.
#pragma once
#include <cuda_runtime.h>

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/arena.h"
#include "cuda/products.h"
#include "ops/backend.h"
#include "ops/cuda_plan.h"

namespace rownorm::cuda {

// Error (exit 5) that names the call when a call of the CUDA runtime did not succeed.
void check(cudaError_t status, const char* call);

// The same number, if a grid may have so many blocks: then and only then does it fit. Error (exit 5).
unsigned grid_size(Index blocks);

// Gives what cudaMalloc and its like gave back.
struct Release {
  cudaError_t (*call)(void*);
  void operator()(void* memory) const { call(memory); }
};

class CudaBackend final : public Backend {
 public:
  // precision "fp32", "tf32" or "bf16"; device number `local_rank`, or the only one that this process sees. Error
  // (exit 5) when there is no such device.
  CudaBackend(const std::string& precision, int local_rank);
  ~CudaBackend() override;
  CudaBackend(const CudaBackend&) = delete;
  CudaBackend& operator=(const CudaBackend&) = delete;

  std::string name() const override { return "cuda"; }
  std::string description() const override;
  DType compute_dtype() const override { return compute_; }
  DType master_dtype() const override { return DType::f32; }
  Memory allocate(std::int64_t bytes) override;
  Memory allocate_host(std::int64_t bytes) override;
  void wait(Ticket ticket) override;
  std::int64_t workspace_bytes(const WorkspaceSizes& sizes) const override;
  void set_workspace(Tensor workspace, const WorkspaceSizes& sizes) override;
  std::int64_t mark() override;
  double seconds_between(std::int64_t from, std::int64_t to) override;
  std::int64_t probe_bytes() const override;
  void prepare_probes(Tensor scratch) override;
  double probe_products(Tensor scratch) override;
  double probe_stream(Tensor scratch) override;
  std::int64_t logits_chunk() const override { return LogitsScratch::rows; }
  std::int64_t logits_columns(std::int64_t vocab) const override { return padded(vocab); }
  bool has(NewtonSchulzPrecision) const override { return true; }

  // For the exchange with other ranks (nccl_comm.h).
  int device() const { return device_; }
  const cudaDeviceProp& properties() const { return properties_; }
  cudaStream_t stream() const { return stream_; }

 protected:
  void do_upload(Tensor to, const void* host) override;
  void do_download(void* host, Tensor from) override;
  Ticket do_start_upload(Tensor to, const void* host) override;
  Ticket do_start_download(void* host, Tensor from) override;
  void do_copy(Tensor to, Tensor from) override;
  void do_fill(Tensor t, double value) override;
  void do_embedding(Tensor y, Tensor tokens, Tensor w) override;
  void do_embedding_backward(Tensor dw, Tensor tokens, Tensor dy) override;
  void do_rmsnorm(Tensor y, Tensor rstd, Tensor x, double eps) override;
  void do_rmsnorm_backward(Tensor dx, Tensor dy, Tensor y, Tensor rstd) override;
  void do_linear(Tensor y, Tensor x, Tensor w, bool accumulate) override;
  void do_linear_input_grad(Tensor dx, Tensor dy, Tensor w) override;
  void do_linear_weight_grad(Tensor dw, Tensor dy, Tensor x) override;
  void do_qk_norm_rope(Tensor qkv, Tensor rstd, Tensor rope, double eps) override;
  void do_qk_norm_rope_backward(Tensor dqkv, Tensor qkv, Tensor rstd, Tensor rope) override;
  void do_attention(Tensor att, Tensor lse, Tensor qkv, std::int64_t context) override;
  void do_attention_backward(Tensor dqkv, Tensor datt, Tensor att, Tensor lse, Tensor qkv,
                             std::int64_t context) override;
  void do_cached_attention(Tensor att, Tensor keys, Tensor values, Tensor qkv, std::int64_t position,
                           std::int64_t head_dim) override;
  void do_swiglu(Tensor y, Tensor gate_up) override;
  void do_swiglu_backward(Tensor dgate_up, Tensor dy, Tensor gate_up) override;
  void do_head_loss(Tensor loss, Tensor dh, Tensor dw, Tensor h, Tensor w, Tensor targets, double scale) override;
  void do_squared_norm(Tensor sum, Tensor x) override;
  void do_clip(const UpdateControl& control, Tensor squares, Tensor loss, double max_norm) override;
  void do_momentum(Tensor out, Tensor buffer, Tensor grad, const UpdateControl& control, const Momentum& m) override;
  void do_adamw(Tensor step, Tensor exp_avg, Tensor exp_avg_sq, Tensor grad, Tensor lr, const UpdateControl& control,
                const AdamWHyper& hyper, std::int64_t t) override;
  void do_newton_schulz(std::span<const Tensor> matrices, int steps, double eps,
                        NewtonSchulzPrecision precision) override;
  void do_row_normalize(Tensor x, double eps) override;
  void do_scale(Tensor x, Tensor factor, double c) override;
  void do_column_sum(Tensor sum, Tensor x) override;
  void do_subtract_row(Tensor x, Tensor row, double c) override;
  void do_apply_step(Tensor w, Tensor step, Tensor lr, double weight_decay, const UpdateControl& control) override;
  void do_row_diameter(Tensor distance, Tensor pair, Tensor s, std::int64_t share, std::int64_t shares) override;
  void do_row_norms(Tensor norms, Tensor s) override;
  void do_row_range(Tensor lowest, Tensor highest, Tensor h, Tensor s) override;

 private:
  bool has_code() const;  // for this device, in this module
  // The part of the workspace that operations share, behind the one that is cuBLASLt's.
  Arena scratch() const;
  void add_squares(Tensor sum, Tensor x, const PartialSums& memory);  // squared_norm

  int device_ = 0;
  std::string precision_;
  DType compute_;
  Multiply multiply_;
  cudaDeviceProp properties_{};
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<Products> products_;
  Tensor workspace_{nullptr, DType::u8, {0}};

  // Pinned memory through which host buffers pass, a ring of pieces; an event says when a piece is free again.
  struct Piece {
    char* data;
    cudaEvent_t free;
  };
  Piece next_piece();
  std::unique_ptr<void, Release> staging_;
  std::array<cudaEvent_t, staging_pieces> staged_{};
  std::size_t next_piece_ = 0;

  // Of copies to and from pinned memory: number i records event i % their number, so that one used again is waited for
  // too long, never too short.
  Ticket copy_started();
  cudaEvent_t copied_[16] = {};
  Ticket copies_ = 0;

  static constexpr Index most_marks = 1 << 20;  // that can still be asked for; their events are used again
  std::vector<cudaEvent_t> marks_;
  Index marked_ = 0;
};

}  // namespace rownorm::cuda
