// The f32 backend: OpenMP over rows, heads or elements, OpenBLAS for matrix products.
#pragma once
#include <cstdint>
#include <span>
#include <string>

#include "base/arena.h"
#include "ops/backend.h"
#include "ops/cpu/kernels.h"

namespace rownorm::cpu {

// What an operation needs of the workspace: built over a measuring arena to size it, over the workspace to use it.
struct AttentionScratch {
  static constexpr Index rows = 64;  // of queries, a tile
  Tensor probabilities, gradients;   // (threads, rows, T): a tile's p, and ds
  AttentionScratch(Arena& arena, int threads, Index context);
};

struct LogitsScratch {
  static constexpr Index rows = 256;  // of tokens, a chunk
  Tensor logits;                      // (min(rows, N), V)
  LogitsScratch(Arena& arena, Index tokens, Index vocab);
};

struct NewtonSchulzScratch {
  Tensor gram, polynomial;  // (parallel matrices, short, short): A, and b A + c A A
  Tensor previous;          // (parallel matrices, short, long)
  NewtonSchulzScratch(Arena& arena, int threads, Index matrices, Index short_side, Index long_side);
};

struct DiameterScratch {
  static constexpr Index block = 256;  // rows
  Tensor mean;                         // (d) f64, the mean row
  Tensor radius;                       // (V) f64, distance of row i from the mean
  Tensor hash;                         // (V) i32, equal for equal rows
  Tensor order;                        // (V) i32, the distinct rows by falling radius: position -> row
  Tensor centred;                      // (V,d) f32 by position, (row - mean) times a power of two
  Tensor half_square;                  // (V) f64 by position, ||centred||^2 / 2
  Tensor products;                     // (threads, block, block) f32
  DiameterScratch(Arena& arena, int threads, Index vocab, Index width);
};

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(int processes);

  std::string name() const override { return "cpu"; }
  std::string description() const override;
  DType compute_dtype() const override { return DType::f32; }
  DType master_dtype() const override { return DType::f32; }
  Memory allocate(std::int64_t bytes) override;
  std::int64_t workspace_bytes(const WorkspaceSizes& sizes) const override;
  void set_workspace(Tensor workspace, const WorkspaceSizes& sizes) override;
  std::int64_t probe_bytes() const override;
  double probe_products(Tensor memory) override;
  double probe_stream(Tensor memory) override;
  std::int64_t logits_chunk() const override { return LogitsScratch::rows; }

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
  void do_newton_schulz(std::span<const Tensor> matrices, int steps, double eps, NewtonSchulzPrecision) override;
  void do_row_normalize(Tensor x, double eps) override;
  void do_scale(Tensor x, Tensor factor, double c) override;
  void do_column_sum(Tensor sum, Tensor x) override;
  void do_subtract_row(Tensor x, Tensor row, double c) override;
  void do_apply_step(Tensor w, Tensor step, Tensor lr, double weight_decay, const UpdateControl& control) override;
  void do_row_diameter(Tensor distance, Tensor pair, Tensor s, std::int64_t share, std::int64_t shares) override;
  void do_row_norms(Tensor norms, Tensor s) override;
  void do_row_range(Tensor lowest, Tensor highest, Tensor h, Tensor s) override;

 private:
  Arena scratch() const { return Arena(workspace_.data, workspace_.bytes()); }

  int processes_, threads_;
  Tensor workspace_{nullptr, DType::u8, {0}};
};

}  // namespace rownorm::cpu
