// The CUDA backend: one device, one stream, f32 masters; activations and products in f32, in tf32 or in bf16.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/arena.h"
#include "cuda/products.h"
#include "ops/backend.h"

namespace rownorm::cuda {

using Index = std::int64_t;

// Error (exit 5) that names the call when a call of the CUDA runtime did not succeed.
void check(cudaError_t status, const char* call);

inline constexpr Index max_head_dim = 128;  // of the attention kernels

// Gives what cudaMalloc and its like gave back.
struct Release {
  cudaError_t (*call)(void*);
  void operator()(void* memory) const { call(memory); }
};

// What an operation needs of the workspace: built over a measuring arena to size it, over the workspace to use it.
struct PartialSums {
  static constexpr Index parts = 1024;  // most blocks that one sum is shared by
  Tensor sums;                          // (parts) f64
  explicit PartialSums(Arena& arena);
};

struct LogitsScratch {
  static constexpr Index rows = 1024;  // of tokens, a chunk
  Tensor logits;                       // (rows, columns) f32; columns is V padded to a multiple of 64, never read
  Tensor gradients;                    // the same in compute precision: scale (softmax - onehot); logits itself in f32
  Tensor losses;                       // (rows) f64
  Tensor hidden;                       // (rows, d) f32: a chunk of h where it is bf16, for row_range
  LogitsScratch(Arena& arena, DType compute, Index tokens, Index vocab, Index width);
};

struct NewtonSchulzScratch {
  Tensor x, next;           // (matrices, m, n)
  Tensor gram, polynomial;  // (matrices, short, short): A, and b A + c A A
  Tensor squares;           // (matrices) f64
  PartialSums sums;
  NewtonSchulzScratch(Arena& arena, Index matrices, Index short_side, Index long_side);
};

struct DiameterScratch {
  static constexpr Index block = 1024;  // rows a product
  Tensor sum;                           // (d) f64, of all rows
  Tensor square;                        // (V) f64, ||row - mean||^2
  Tensor centred;                       // (V,d) f32, (row - mean) times a power of two
  Tensor half_square;                   // (V) f64, ||centred||^2 / 2
  Tensor products;                      // (min(block, V), columns) f32; columns is V padded as that of logits
  Tensor found;                         // the best pair of each block of a kernel
  Tensor state;                         // what the search knows
  DiameterScratch(Arena& arena, Index vocab, Index width);
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
  std::int64_t workspace_bytes(const WorkspaceSizes& sizes) const override;
  void set_workspace(Tensor workspace, const WorkspaceSizes& sizes) override;
  std::int64_t mark() override;
  double seconds_between(std::int64_t from, std::int64_t to) override;
  std::int64_t logits_chunk() const override { return LogitsScratch::rows; }

  // For the exchange with other ranks (nccl_comm.h).
  int device() const { return device_; }
  const cudaDeviceProp& properties() const { return properties_; }
  cudaStream_t stream() const { return stream_; }

 protected:
  void do_upload(Tensor to, const void* host) override;
  void do_download(void* host, Tensor from) override;
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
  void do_newton_schulz(std::span<const Tensor> matrices, int steps, double eps) override;
  void do_row_normalize(Tensor x, double eps) override;
  void do_scale(Tensor x, Tensor factor, double c) override;
  void do_column_sum(Tensor sum, Tensor x) override;
  void do_subtract_row(Tensor x, Tensor row, double c) override;
  void do_apply_step(Tensor w, Tensor step, Tensor lr, double weight_decay, const UpdateControl& control) override;
  void do_row_diameter(Tensor distance, Tensor pair, Tensor s, std::int64_t share, std::int64_t shares) override;
  void do_row_norms(Tensor norms, Tensor s) override;
  void do_row_range(Tensor lowest, Tensor highest, Tensor h, Tensor s) override;

 private:
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

  // Pinned memory through which host buffers pass, half by half; `staged_` says when a half is free again.
  static constexpr Index staging_bytes = Index{4} << 20;  // of a half
  std::unique_ptr<void, Release> staging_;
  cudaEvent_t staged_[2] = {};

  static constexpr Index most_marks = 1 << 16;  // that can still be asked for; their events are used again
  std::vector<cudaEvent_t> marks_;
  Index marked_ = 0;
};

}  // namespace rownorm::cuda
