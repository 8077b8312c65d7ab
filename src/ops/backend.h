// The device contract: every operation that the model, the optimizers and the measurements are written in.
//
// Sizes: N tokens of a batch (whole sequences of T tokens, row n is position n % T), d width, H heads of size d/H,
// F MLP width, V vocabulary rows (or a block of them), P panel rows.
// Dtypes: "compute" holds weights in products and activations, "master" parameters, gradients, optimizer state and row
// statistics; on the CPU both are f32, on the reference f64, with bf16 products compute is bf16 and master f32.
// Scalars are 1-element f64 tensors, flags and token ids i32.
//
// Every operation only enqueues; read() and download() wait for what was enqueued before. Outputs are written whole
// unless "+=" says that they accumulate. Inputs and outputs never overlap unless an operation says "in place".
// The public functions check shapes and dtypes once (std::logic_error "[operation] name is ..., expected ...": a wrong
// call is a bug of ours, never a user's) and call the backend's do_*. Token ids are checked where data is loaded, not
// here. Results do not depend on anything but the inputs and the number of threads: same call, same bits.
//
// There may be no rows (N = 0, an empty block of V or P): outputs are then empty, sums add nothing, row_range's bounds
// are +inf and -inf. Widths (d, F, head_dim) are at least 1. Non-finite values propagate into the results that depend
// on them; no operation drops a NaN in a maximum, a minimum or a sum.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/arena.h"
#include "base/tensor.h"

namespace rownorm {

// Owned device memory, given back on destruction.
using Memory = std::unique_ptr<void, std::function<void(void*)>>;

// Whether and by how much the update under way changes anything; computed on the device by clip().
struct UpdateControl {
  Tensor norm;  // (1) f64, global gradient norm before clipping
  Tensor clip;  // (1) f64, coefficient that multiplies every gradient; 0 when `ok` is 0
  Tensor ok;    // (1) i32, 1 from the start of a run until a loss or norm is not finite, then 0 for good, so that the
                // host may look later; at 0 momentum, adamw and apply_step leave state and weights as they are,
                // whatever the gradient and lr hold, and write their increment as zeros
};

struct AdamWHyper {
  double beta1, beta2, eps;
};

// How newton_schulz multiplies, with sums in fp32: fp32 is the device's best (f64 on the reference); tf32 rounds what
// it multiplies to 11 bits; bf16 also holds the iterates in bf16, normalised before.
enum class NewtonSchulzPrecision { fp32, tf32, bf16 };
const char* name_of(NewtonSchulzPrecision precision);

// Of one newton_schulz call; a matrix and its transpose need the same.
struct NewtonSchulzSizes {
  std::int64_t matrices = 0, short_side = 0, long_side = 0;
  NewtonSchulzPrecision precision = NewtonSchulzPrecision::fp32;
};

// The largest shapes a run will use, from which a backend sizes its one workspace.
struct WorkspaceSizes {
  std::int64_t tokens = 0;                            // N of one micro-batch
  std::int64_t context = 0;                           // T
  std::int64_t width = 0;                             // d
  std::int64_t heads = 0;                             // H
  std::int64_t vocab = 0;                             // V
  std::int64_t panel = 0;                             // P; 0 = row_range is not used
  bool diameter = false;                              // row_diameter of (V, d) is used
  std::vector<NewtonSchulzSizes> newton_schulz = {};  // one of them bounds each call
};

// One call of an operation as an observer sees it: what its equations ask for, however a backend goes about it.
struct Work {
  const char* operation;  // the public function's name
  // 2 a multiply-add of its matrix products (attention over the pairs i >= j, with the scores that backward computes
  // again; row_diameter over all pairs, of which a search may skip some). Other arithmetic is not counted.
  double flops;
  // Every operand read or written once, both where it accumulates or is in place; of an embedding the rows of its
  // tokens. Scalars and scratch are not counted.
  double bytes;
  // linear, linear_*_grad: (N, m, k); head_loss, row_range: (rows, V, d); newton_schulz: (matrices, m, n, steps).
  Shape sizes = {};
};

class Observer {
 public:
  virtual ~Observer() = default;
  virtual void begin(const Work& work) = 0;  // before the operation enqueues anything
  virtual void end() = 0;                    // when it has enqueued everything
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual std::string name() const = 0;         // "cpu", "reference", "cuda"
  virtual std::string description() const = 0;  // one line for the log: device, threads, libraries
  virtual DType compute_dtype() const = 0;
  virtual DType master_dtype() const = 0;

  // ---- memory and transport ----
  // `bytes` of zeroed memory, aligned to Arena::alignment. Error (exit 5) with the figure when it cannot be had.
  virtual Memory allocate(std::int64_t bytes) = 0;
  virtual std::int64_t workspace_bytes(const WorkspaceSizes& sizes) const = 0;
  // One u8 tensor of at least workspace_bytes(sizes), used by every later operation; sizes bound their shapes.
  virtual void set_workspace(Tensor workspace, const WorkspaceSizes& sizes) = 0;
  void upload(Tensor to, const void* host);  // to.bytes() from the host; the host buffer is free again on return
  void download(void* host, Tensor from);    // from.bytes() to the host; waits
  double read(Tensor scalar);                // a 1-element tensor of any dtype; waits
  // The same without waiting: the host's side, in memory of allocate_host(), is the device's until wait(ticket), which
  // waits for that copy and what was enqueued before it, not for what came later.
  using Ticket = std::int64_t;
  Ticket start_upload(Tensor to, const void* host);
  Ticket start_download(void* host, Tensor from);
  virtual void wait(Ticket) {}
  // `bytes` of zeroed memory of the host, aligned to Arena::alignment, pinned where a device copies by itself; to be
  // given back before the backend goes. Error (exit 5) when it cannot be had.
  virtual Memory allocate_host(std::int64_t bytes);
  void copy(Tensor to, Tensor from);  // same shape; converts between f64, f32 and bf16 (to nearest even,
                                      // f64 to bf16 by way of f32)
  void fill(Tensor t, double value);  // f64, f32, bf16, i32

  // ---- timing ----
  void observe(Observer* observer) { observer_ = observer; }  // of every operation from now on; null: none
  // A moment in the order of what is enqueued, and the seconds between two of them, for which it waits. Here the host's
  // clock, for operations that are done when they return; a device with a queue needs events in it.
  virtual std::int64_t mark();
  virtual double seconds_between(std::int64_t from, std::int64_t to);
  // The device's own bounds, made with `scratch`, u8 of at least probe_bytes(): products as fast as it can make them in
  // compute precision (the FLOPs are returned), and a stream through more memory than its caches hold (bytes read and
  // written). 0: there is no such figure, as for plain loops.
  virtual std::int64_t probe_bytes() const { return 0; }
  virtual void prepare_probes(Tensor) {}  // once, before the two below
  virtual double probe_products(Tensor) { return 0; }
  virtual double probe_stream(Tensor) { return 0; }
  // Tokens of which head_loss and row_range hold the logits at a time.
  virtual std::int64_t logits_chunk() const = 0;
  // Columns of them that head_loss computes: V, or more where that is faster.
  virtual std::int64_t logits_columns(std::int64_t vocab) const { return vocab; }

  // ---- embedding ----
  void embedding(Tensor y, Tensor tokens, Tensor w);             // y(N,d) = rows of w(V,d), tokens(N) i32 in [0, V)
  void embedding_backward(Tensor dw, Tensor tokens, Tensor dy);  // dw(V,d) master += dy(N,d), rows summed in order n

  // ---- RMSNorm without gain: y = x * rstd, rstd = 1/sqrt(mean(x^2) + eps) (PAPER 2) ----
  void rmsnorm(Tensor y, Tensor rstd, Tensor x, double eps);           // y, x (N,d); rstd(N) master
  void rmsnorm_backward(Tensor dx, Tensor dy, Tensor y, Tensor rstd);  // dx += rstd * (dy - y * mean(dy * y))

  // ---- linear maps y = x W^T, W (outputs, inputs) as in PyTorch ----
  void linear(Tensor y, Tensor x, Tensor w, bool accumulate = false);  // y(N,m) [+]= x(N,k) w(m,k)^T
  void linear_input_grad(Tensor dx, Tensor dy, Tensor w);              // dx(N,k) = dy(N,m) w(m,k)
  void linear_weight_grad(Tensor dw, Tensor dy, Tensor x);             // dw(m,k) master += dy(N,m)^T x(N,k)

  // ---- attention: qkv(N,3d) holds q | k | v, each as H heads of size d/H ----
  // In place: RMSNorm over each head of q and k, then RoPE with half-split pairing (i with i + head_dim/2).
  // rstd(N,2H) master: q's heads, then k's. rope(T, head_dim) master, row = position: cos in [0, head_dim/2), sin in
  // [head_dim/2, head_dim) of pos * base^(-2i/head_dim). Rotation: (a, b) -> (a cos - b sin, b cos + a sin).
  void qk_norm_rope(Tensor qkv, Tensor rstd, Tensor rope, double eps);
  // In place on dqkv, from the rotated qkv: inverse rotation, then the norm's backward. v's part is untouched. (The
  // norm has no gain and commutes with the rotation, so the rotated q and rstd are all that is needed.)
  void qk_norm_rope_backward(Tensor dqkv, Tensor qkv, Tensor rstd, Tensor rope);
  // att(N,d) = causal softmax(q k^T / sqrt(head_dim)) v within each sequence of `context` rows;
  // lse(N,H) master: log of the sum of exponentials of the scaled scores.
  void attention(Tensor att, Tensor lse, Tensor qkv, std::int64_t context);
  void attention_backward(Tensor dqkv, Tensor datt, Tensor att, Tensor lse, Tensor qkv, std::int64_t context);
  // The same for the next N positions of one sequence, after `position` earlier ones whose keys and values are rows
  // [0, position) of keys, values (T,d) compute: qkv's k and v become rows [position, position + N), position + N <= T,
  // and att(N,d)_n = softmax over j <= position + n of (q_n keys_j^T / sqrt(head_dim)) values_j, head by head.
  void cached_attention(Tensor att, Tensor keys, Tensor values, Tensor qkv, std::int64_t position,
                        std::int64_t head_dim);

  // ---- SwiGLU: gate_up(N,2F) holds gate | up; y(N,F) = silu(gate) * up ----
  void swiglu(Tensor y, Tensor gate_up);
  void swiglu_backward(Tensor dgate_up, Tensor dy, Tensor gate_up);

  // ---- head and cross entropy, logits h w^T for a chunk of tokens at a time, never for all ----
  // ce_n = logsumexp(logits_n) - logits_n[target_n]; loss += scale * sum_n ce_n (f64);
  // dh(N,d) = scale * (softmax - onehot) w; dw(V,d) master += scale * (softmax - onehot)^T h.
  void head_loss(Tensor loss, Tensor dh, Tensor dw, Tensor h, Tensor w, Tensor targets, double scale);
  void head_loss(Tensor loss, Tensor h, Tensor w, Tensor targets, double scale);  // forward only

  // ---- the update (PAPER 4) ----
  void squared_norm(Tensor sum, Tensor x);  // sum(1) f64 += ||x||^2, squares and sums in f64
  // norm = sqrt(squares), as it is (NaN or infinite) when not finite; ok = ok and finite(loss) and finite(norm);
  // clip = min(1, max_norm / (norm + 1e-6)), 0 when not ok. max_norm > 0; infinite: no clipping.
  void clip(const UpdateControl& control, Tensor squares, Tensor loss, double max_norm);
  // With g = clip * grad: buffer = decay * buffer + grad_in * g; out = buffer_out * buffer + grad_out * g.
  // Muon: (0.95, 1; 0.95, 1) or (0.95, 1; 1, 0); RowNorm: (beta, 1 - beta; 1/(1 - beta^t), 0). All master, same shape.
  struct Momentum {
    double decay, grad_in, buffer_out, grad_out;
  };
  void momentum(Tensor out, Tensor buffer, Tensor grad, const UpdateControl& control, const Momentum& m);
  // step = -lr * mhat / (sqrt(vhat) + eps), moments of clip * grad updated in place, t >= 1 the count of this update.
  void adamw(Tensor step, Tensor exp_avg, Tensor exp_avg_sq, Tensor grad, Tensor lr, const UpdateControl& control,
             const AdamWHyper& hyper, std::int64_t t);
  // In place on matrices of one shape (m,n): x /= ||x||_F + eps, then `steps` times, on the side with fewer rows,
  // A = x x^T, x = 3.4445 x + (-4.7750 A + 2.0315 A A) x: a matrix with m > n is treated as its transpose. A zero
  // matrix stays exactly zero, also with eps = 0.
  void newton_schulz(std::span<const Tensor> matrices, int steps, double eps,
                     NewtonSchulzPrecision precision = NewtonSchulzPrecision::fp32);
  virtual bool has(NewtonSchulzPrecision precision) const { return precision == NewtonSchulzPrecision::fp32; }
  // In place: row i /= ||row i||_2 + eps, the norm in f64. A zero row stays exactly zero, also with eps = 0.
  void row_normalize(Tensor x, double eps);
  void scale(Tensor x, Tensor factor, double c);      // in place: x *= factor(1) f64 * c
  void column_sum(Tensor sum, Tensor x);              // sum(d) f64 = sum of the rows of x(V,d), in f64
  void subtract_row(Tensor x, Tensor row, double c);  // in place: each row -= c * row(d) f64
  // w = (1 - lr * weight_decay) * w + step; nothing when ok is 0. (decoupled weight decay)
  void apply_step(Tensor w, Tensor step, Tensor lr, double weight_decay, const UpdateControl& control);

  // ---- measurements (PAPER 5) ----
  // The largest ||s_i - s_j||_2 over all pairs of rows of s(V,d), every pair that could be it evaluated in f64 on the
  // stored values; pair(2) i32 is the lexicographically smallest (i < j) that attains it; (0, 0) and 0 when no two rows
  // differ. `share` of `shares` ranks looks at its part of the pairs: together the shares look at every pair, the
  // maximum over them is the diameter, and the smallest pair of the shares that attain it is the pair.
  // With a non-finite element anywhere in s, whatever the share: distance NaN, pair (r, r), r the first such row.
  void row_diameter(Tensor distance, Tensor pair, Tensor s, std::int64_t share = 0, std::int64_t shares = 1);
  void row_norms(Tensor norms, Tensor s);  // norms(V) f64
  // lowest(P), highest(P) master: min and max over i of (s h_p)_i; h(P,d) compute, s(V,d) master; by chunks of P.
  // Both NaN if any (s h_p)_i is.
  void row_range(Tensor lowest, Tensor highest, Tensor h, Tensor s);

 protected:
  virtual void do_upload(Tensor to, const void* host) = 0;
  virtual void do_download(void* host, Tensor from) = 0;
  // Here for operations that are done when they return.
  virtual Ticket do_start_upload(Tensor to, const void* host) {
    do_upload(to, host);
    return 0;
  }
  virtual Ticket do_start_download(void* host, Tensor from) {
    do_download(host, from);
    return 0;
  }
  virtual void do_copy(Tensor to, Tensor from) = 0;
  virtual void do_fill(Tensor t, double value) = 0;
  virtual void do_embedding(Tensor y, Tensor tokens, Tensor w) = 0;
  virtual void do_embedding_backward(Tensor dw, Tensor tokens, Tensor dy) = 0;
  virtual void do_rmsnorm(Tensor y, Tensor rstd, Tensor x, double eps) = 0;
  virtual void do_rmsnorm_backward(Tensor dx, Tensor dy, Tensor y, Tensor rstd) = 0;
  virtual void do_linear(Tensor y, Tensor x, Tensor w, bool accumulate) = 0;
  virtual void do_linear_input_grad(Tensor dx, Tensor dy, Tensor w) = 0;
  virtual void do_linear_weight_grad(Tensor dw, Tensor dy, Tensor x) = 0;
  virtual void do_qk_norm_rope(Tensor qkv, Tensor rstd, Tensor rope, double eps) = 0;
  virtual void do_qk_norm_rope_backward(Tensor dqkv, Tensor qkv, Tensor rstd, Tensor rope) = 0;
  virtual void do_attention(Tensor att, Tensor lse, Tensor qkv, std::int64_t context) = 0;
  virtual void do_attention_backward(Tensor dqkv, Tensor datt, Tensor att, Tensor lse, Tensor qkv,
                                     std::int64_t context) = 0;
  virtual void do_cached_attention(Tensor att, Tensor keys, Tensor values, Tensor qkv, std::int64_t position,
                                   std::int64_t head_dim) = 0;
  virtual void do_swiglu(Tensor y, Tensor gate_up) = 0;
  virtual void do_swiglu_backward(Tensor dgate_up, Tensor dy, Tensor gate_up) = 0;
  // dh and dw are null (data == nullptr) for the forward-only form
  virtual void do_head_loss(Tensor loss, Tensor dh, Tensor dw, Tensor h, Tensor w, Tensor targets, double scale) = 0;
  virtual void do_squared_norm(Tensor sum, Tensor x) = 0;
  virtual void do_clip(const UpdateControl& control, Tensor squares, Tensor loss, double max_norm) = 0;
  virtual void do_momentum(Tensor out, Tensor buffer, Tensor grad, const UpdateControl& control, const Momentum& m) = 0;
  virtual void do_adamw(Tensor step, Tensor exp_avg, Tensor exp_avg_sq, Tensor grad, Tensor lr,
                        const UpdateControl& control, const AdamWHyper& hyper, std::int64_t t) = 0;
  virtual void do_newton_schulz(std::span<const Tensor> matrices, int steps, double eps,
                                NewtonSchulzPrecision precision) = 0;
  virtual void do_row_normalize(Tensor x, double eps) = 0;
  virtual void do_scale(Tensor x, Tensor factor, double c) = 0;
  virtual void do_column_sum(Tensor sum, Tensor x) = 0;
  virtual void do_subtract_row(Tensor x, Tensor row, double c) = 0;
  virtual void do_apply_step(Tensor w, Tensor step, Tensor lr, double weight_decay, const UpdateControl& control) = 0;
  virtual void do_row_diameter(Tensor distance, Tensor pair, Tensor s, std::int64_t share, std::int64_t shares) = 0;
  virtual void do_row_norms(Tensor norms, Tensor s) = 0;
  virtual void do_row_range(Tensor lowest, Tensor highest, Tensor h, Tensor s) = 0;

 private:
  Observer* observer_ = nullptr;
};

// Memory for a measured plan; the Error when it cannot be had says what it would be for.
Memory allocate_plan(Backend& be, const Arena& plan);

// Runs `build` to measure what it asks the arena for, allocates that, and runs it again to bind it.
Memory allocate_tensors(Backend& be, const std::function<void(Arena&)>& build);

// Coefficients of the quintic Newton-Schulz iteration (PAPER 4).
inline constexpr double newton_schulz_a = 3.4445, newton_schulz_b = -4.7750, newton_schulz_c = 2.0315;

}  // namespace rownorm
