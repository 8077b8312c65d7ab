// Every operation as plain loops in double: the specification of the other backends, and an audit mode. Nothing here is
// fast, blocked or parallel; each loop stands under its equation.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/arena.h"
#include "base/bf16.h"
#include "base/error.h"
#include "ops/host_memory.h"
#include "ops/open.h"

namespace rownorm {
namespace {

using Index = std::int64_t;

double* f64(Tensor t) { return t.as<double>(); }
std::int32_t* i32(Tensor t) { return t.as<std::int32_t>(); }

double dot(const double* a, const double* b, Index n) {
  double sum = 0;
  for (Index i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

bool all_finite(const double* x, Index n) {
  return std::all_of(x, x + n, [](double v) { return std::isfinite(v); });
}

double silu(double x) { return x / (1 + std::exp(-x)); }

double get(Tensor t, Index i) {
  if (t.dtype == DType::f64) return t.as<double>()[i];
  if (t.dtype == DType::f32) return t.as<float>()[i];
  return from_bf16(static_cast<const std::uint16_t*>(t.data)[i]);
}

void set(Tensor t, Index i, double value) {
  if (t.dtype == DType::f64)
    t.as<double>()[i] = value;
  else if (t.dtype == DType::f32)
    t.as<float>()[i] = static_cast<float>(value);
  else
    static_cast<std::uint16_t*>(t.data)[i] = to_bf16(static_cast<float>(value));
}

// Where head `head` of q (part 0), k (1) or v (2) of token n lies in qkv(N,3d).
struct Heads {
  Index count, size;  // H, head_dim
  Index at(Index n, Index part, Index head) const { return (3 * n + part) * count * size + head * size; }
};

class ReferenceBackend final : public Backend {
 public:
  explicit ReferenceBackend(int processes) : processes_(processes) {}
  std::string name() const override { return "reference"; }
  std::string description() const override { return "reference: plain loops in double, one thread"; }
  DType compute_dtype() const override { return DType::f64; }
  DType master_dtype() const override { return DType::f64; }

  Memory allocate(Index bytes) override { return allocate_host_memory("reference", bytes, processes_); }
  Index workspace_bytes(const WorkspaceSizes&) const override { return 0; }
  void set_workspace(Tensor, const WorkspaceSizes&) override {}
  Index logits_chunk() const override { return 1; }

 protected:
  void do_upload(Tensor to, const void* host) override {
    std::copy_n(static_cast<const char*>(host), to.bytes(), static_cast<char*>(to.data));
  }
  void do_download(void* host, Tensor from) override {
    std::copy_n(static_cast<const char*>(from.data), from.bytes(), static_cast<char*>(host));
  }

  void do_copy(Tensor to, Tensor from) override {
    if (to.dtype == from.dtype) return do_upload(to, from.data);
    for (Index i = 0; i < to.size(); ++i) set(to, i, get(from, i));
  }

  void do_fill(Tensor t, double value) override {
    for (Index i = 0; i < t.size(); ++i) {
      if (t.dtype == DType::i32)
        i32(t)[i] = static_cast<std::int32_t>(value);
      else
        set(t, i, value);
    }
  }

  // ---- embedding (PAPER 2): y_n = w[token_n] ----

  void do_embedding(Tensor y, Tensor tokens, Tensor w) override {
    const Index d = w.dim(1);
    for (Index n = 0; n < y.dim(0); ++n)
      for (Index j = 0; j < d; ++j) f64(y)[n * d + j] = f64(w)[i32(tokens)[n] * d + j];
  }

  void do_embedding_backward(Tensor dw, Tensor tokens, Tensor dy) override {
    const Index d = dw.dim(1);
    for (Index n = 0; n < dy.dim(0); ++n)
      for (Index j = 0; j < d; ++j) f64(dw)[i32(tokens)[n] * d + j] += f64(dy)[n * d + j];
  }

  // ---- RMSNorm without gain (PAPER 2): y = x rstd, rstd = 1 / sqrt(mean(x^2) + eps) ----

  static double normalize(double* y, const double* x, Index d, double eps) {
    const double rstd = 1 / std::sqrt(dot(x, x, d) / static_cast<double>(d) + eps);
    for (Index j = 0; j < d; ++j) y[j] = x[j] * rstd;
    return rstd;
  }

  // dL/dx = rstd (dy - y mean(dy y)): d rstd / dx_j = -rstd^3 x_j / d, whatever eps is.
  static void normalize_backward(double* dx, const double* dy, const double* y, double rstd, Index d) {
    const double mean = dot(dy, y, d) / static_cast<double>(d);
    for (Index j = 0; j < d; ++j) dx[j] = rstd * (dy[j] - y[j] * mean);
  }

  void do_rmsnorm(Tensor y, Tensor rstd, Tensor x, double eps) override {
    const Index d = x.dim(1);
    for (Index n = 0; n < x.dim(0); ++n) f64(rstd)[n] = normalize(f64(y) + n * d, f64(x) + n * d, d, eps);
  }

  void do_rmsnorm_backward(Tensor dx, Tensor dy, Tensor y, Tensor rstd) override {
    const Index d = y.dim(1);
    std::vector<double> part(static_cast<std::size_t>(d));
    for (Index n = 0; n < y.dim(0); ++n) {
      normalize_backward(part.data(), f64(dy) + n * d, f64(y) + n * d, f64(rstd)[n], d);
      for (Index j = 0; j < d; ++j) f64(dx)[n * d + j] += part[static_cast<std::size_t>(j)];
    }
  }

  // ---- linear maps (PAPER 2): y = x W^T, so dx = dy W and dW = dy^T x ----

  void do_linear(Tensor y, Tensor x, Tensor w, bool accumulate) override {
    const Index m = w.dim(0), k = w.dim(1);
    for (Index n = 0; n < x.dim(0); ++n)
      for (Index i = 0; i < m; ++i) {
        double& out = f64(y)[n * m + i];
        out = (accumulate ? out : 0) + dot(f64(x) + n * k, f64(w) + i * k, k);
      }
  }

  void do_linear_input_grad(Tensor dx, Tensor dy, Tensor w) override {
    const Index m = w.dim(0), k = w.dim(1);
    std::fill_n(f64(dx), dx.size(), 0.0);
    for (Index n = 0; n < dx.dim(0); ++n)
      for (Index i = 0; i < m; ++i)
        for (Index j = 0; j < k; ++j) f64(dx)[n * k + j] += f64(dy)[n * m + i] * f64(w)[i * k + j];
  }

  void do_linear_weight_grad(Tensor dw, Tensor dy, Tensor x) override {
    const Index m = dw.dim(0), k = dw.dim(1);
    for (Index n = 0; n < x.dim(0); ++n)
      for (Index i = 0; i < m; ++i)
        for (Index j = 0; j < k; ++j) f64(dw)[i * k + j] += f64(dy)[n * m + i] * f64(x)[n * k + j];
  }

  // ---- RMSNorm of each head of q and k, then RoPE (PAPER 2) ----

  // (a, b) -> (a cos - b sin, b cos + a sin) for a = x_i, b = x_{i + head_dim/2}; sign -1: the inverse.
  static void rotate(double* x, const double* rope, Index head_dim, double sign) {
    const Index half = head_dim / 2;
    for (Index i = 0; i < half; ++i) {
      const double a = x[i], b = x[i + half], cos = rope[i], sin = sign * rope[i + half];
      x[i] = a * cos - b * sin;
      x[i + half] = b * cos + a * sin;
    }
  }

  void do_qk_norm_rope(Tensor qkv, Tensor rstd, Tensor rope, double eps) override {
    const Index T = rope.dim(0), head_dim = rope.dim(1);
    const Heads heads{rstd.dim(1) / 2, head_dim};
    for (Index n = 0; n < qkv.dim(0); ++n)
      for (Index part = 0; part < 2; ++part)
        for (Index h = 0; h < heads.count; ++h) {
          double* x = f64(qkv) + heads.at(n, part, h);
          f64(rstd)[(2 * n + part) * heads.count + h] = normalize(x, x, head_dim, eps);
          rotate(x, f64(rope) + n % T * head_dim, head_dim, 1);
        }
  }

  // With z = R y, y = x rstd: dL/dy = R^T dz, and mean(dy y) = mean(dz z), so
  // dx = rstd (R^T dz - R^T z mean(dz z)) = R^T [rstd (dz - z mean(dz z))].
  void do_qk_norm_rope_backward(Tensor dqkv, Tensor qkv, Tensor rstd, Tensor rope) override {
    const Index T = rope.dim(0), head_dim = rope.dim(1);
    const Heads heads{rstd.dim(1) / 2, head_dim};
    for (Index n = 0; n < qkv.dim(0); ++n)
      for (Index part = 0; part < 2; ++part)
        for (Index h = 0; h < heads.count; ++h) {
          double* dz = f64(dqkv) + heads.at(n, part, h);
          const double* z = f64(qkv) + heads.at(n, part, h);
          normalize_backward(dz, dz, z, f64(rstd)[(2 * n + part) * heads.count + h], head_dim);
          rotate(dz, f64(rope) + n % T * head_dim, head_dim, -1);
        }
  }

  // ---- causal attention (PAPER 2) ----

  // s_ij = q_i . k_j / sqrt(head_dim), j <= i; lse_i = log sum_j exp(s_ij); p_ij = exp(s_ij - lse_i);
  // att_i = sum_j p_ij v_j.
  void do_attention(Tensor att, Tensor lse, Tensor qkv, Index context) override {
    const Index H = lse.dim(1), head_dim = att.dim(1) / H;
    const Heads heads{H, head_dim};
    const double scale = 1 / std::sqrt(static_cast<double>(head_dim));
    std::vector<double> s(static_cast<std::size_t>(context));
    for (Index i = 0; i < qkv.dim(0); ++i)
      for (Index h = 0; h < H; ++h) {
        const Index first = i - i % context;
        const double* q = f64(qkv) + heads.at(i, 0, h);
        for (Index j = first; j <= i; ++j)
          s[static_cast<std::size_t>(j - first)] = scale * dot(q, f64(qkv) + heads.at(j, 1, h), head_dim);
        const double log_sum = log_sum_exp(s.data(), i - first + 1);
        f64(lse)[i * H + h] = log_sum;
        double* out = f64(att) + (i * H + h) * head_dim;
        std::fill_n(out, head_dim, 0.0);
        for (Index j = first; j <= i; ++j) {
          const double p = std::exp(s[static_cast<std::size_t>(j - first)] - log_sum);
          for (Index c = 0; c < head_dim; ++c) out[c] += p * f64(qkv)[heads.at(j, 2, h) + c];
        }
      }
  }

  // dv_j = sum_i p_ij datt_i; ds_ij = p_ij (datt_i . v_j - datt_i . att_i), since sum_j p_ij v_j = att_i;
  // dq_i = sum_j ds_ij k_j / sqrt(head_dim); dk_j = sum_i ds_ij q_i / sqrt(head_dim).
  void do_attention_backward(Tensor dqkv, Tensor datt, Tensor att, Tensor lse, Tensor qkv, Index context) override {
    const Index H = lse.dim(1), head_dim = att.dim(1) / H;
    const Heads heads{H, head_dim};
    const double scale = 1 / std::sqrt(static_cast<double>(head_dim));
    std::fill_n(f64(dqkv), dqkv.size(), 0.0);
    for (Index i = 0; i < qkv.dim(0); ++i)
      for (Index h = 0; h < H; ++h) {
        const Index qi = heads.at(i, 0, h);
        const double* dout = f64(datt) + (i * H + h) * head_dim;
        const double dout_out = dot(dout, f64(att) + (i * H + h) * head_dim, head_dim);
        for (Index j = i - i % context; j <= i; ++j) {
          const Index kj = heads.at(j, 1, h), vj = heads.at(j, 2, h);
          const double p = std::exp(scale * dot(f64(qkv) + qi, f64(qkv) + kj, head_dim) - f64(lse)[i * H + h]);
          const double ds = p * (dot(dout, f64(qkv) + vj, head_dim) - dout_out);
          for (Index c = 0; c < head_dim; ++c) {
            f64(dqkv)[vj + c] += p * dout[c];
            f64(dqkv)[qi + c] += scale * ds * f64(qkv)[kj + c];
            f64(dqkv)[kj + c] += scale * ds * f64(qkv)[qi + c];
          }
        }
      }
  }

  // As attention's, keys and values from the cache: s_nj = q_n . k_j / sqrt(head_dim), j <= position + n.
  void do_cached_attention(Tensor att, Tensor keys, Tensor values, Tensor qkv, Index position,
                           Index head_dim) override {
    const Index N = att.dim(0), d = att.dim(1);
    const double scale = 1 / std::sqrt(static_cast<double>(head_dim));
    for (Index n = 0; n < N; ++n) {
      std::copy_n(f64(qkv) + (3 * n + 1) * d, d, f64(keys) + (position + n) * d);
      std::copy_n(f64(qkv) + (3 * n + 2) * d, d, f64(values) + (position + n) * d);
    }
    for (Index n = 0; n < N; ++n)
      for (Index first = 0; first < d; first += head_dim) {  // a head's columns
        const Index count = position + n + 1;
        std::vector<double> s(static_cast<std::size_t>(count));
        for (Index j = 0; j < count; ++j)
          s[static_cast<std::size_t>(j)] =
              scale * dot(f64(qkv) + 3 * n * d + first, f64(keys) + j * d + first, head_dim);
        const double log_sum = log_sum_exp(s.data(), count);
        double* out = f64(att) + n * d + first;
        std::fill_n(out, head_dim, 0.0);
        for (Index j = 0; j < count; ++j)
          for (Index c = 0; c < head_dim; ++c)
            out[c] += std::exp(s[static_cast<std::size_t>(j)] - log_sum) * f64(values)[j * d + first + c];
      }
  }

  // ---- SwiGLU (PAPER 2): y = silu(gate) up, silu(x) = x sigmoid(x) ----

  void do_swiglu(Tensor y, Tensor gate_up) override {
    const Index F = y.dim(1);
    for (Index n = 0; n < y.dim(0); ++n)
      for (Index j = 0; j < F; ++j) {
        const double gate = f64(gate_up)[2 * n * F + j], up = f64(gate_up)[(2 * n + 1) * F + j];
        f64(y)[n * F + j] = silu(gate) * up;
      }
  }

  // silu'(x) = sigmoid(x) (1 + x (1 - sigmoid(x))), and 1 - sigmoid(x) = sigmoid(-x).
  void do_swiglu_backward(Tensor dgate_up, Tensor dy, Tensor gate_up) override {
    const Index F = dy.dim(1);
    for (Index n = 0; n < dy.dim(0); ++n)
      for (Index j = 0; j < F; ++j) {
        const double gate = f64(gate_up)[2 * n * F + j], up = f64(gate_up)[(2 * n + 1) * F + j];
        const double sigmoid = 1 / (1 + std::exp(-gate)), opposite = 1 / (1 + std::exp(gate));
        f64(dgate_up)[2 * n * F + j] = f64(dy)[n * F + j] * up * sigmoid * (1 + gate * opposite);
        f64(dgate_up)[(2 * n + 1) * F + j] = f64(dy)[n * F + j] * silu(gate);
      }
  }

  // ---- head and cross entropy (PAPER 1, 4) ----

  static double log_sum_exp(const double* x, Index n) {
    const double highest = *std::max_element(x, x + n);
    double sum = 0;
    for (Index i = 0; i < n; ++i) sum += std::exp(x[i] - highest);
    return highest + std::log(sum);
  }

  // z = h w^T; ce_n = log sum_i exp(z_ni) - z_n,target; r = softmax(z_n) - onehot(target): dh = scale r w, dw = scale r
  // h^T.
  void do_head_loss(Tensor loss, Tensor dh, Tensor dw, Tensor h, Tensor w, Tensor targets, double scale) override {
    const Index V = w.dim(0), d = w.dim(1);
    std::vector<double> z(static_cast<std::size_t>(V));
    double sum = 0;
    for (Index n = 0; n < h.dim(0); ++n) {
      const double* h_n = f64(h) + n * d;
      for (Index i = 0; i < V; ++i) z[static_cast<std::size_t>(i)] = dot(h_n, f64(w) + i * d, d);
      const double log_sum = log_sum_exp(z.data(), V);
      sum += log_sum - z[static_cast<std::size_t>(i32(targets)[n])];
      if (!dh.data) continue;
      std::fill_n(f64(dh) + n * d, d, 0.0);
      for (Index i = 0; i < V; ++i) {
        const double r = std::exp(z[static_cast<std::size_t>(i)] - log_sum) - (i == i32(targets)[n] ? 1 : 0);
        for (Index j = 0; j < d; ++j) {
          f64(dh)[n * d + j] += scale * r * f64(w)[i * d + j];
          f64(dw)[i * d + j] += scale * r * h_n[j];
        }
      }
    }
    *f64(loss) += scale * sum;
  }

  // ---- the update (PAPER 4) ----

  void do_squared_norm(Tensor sum, Tensor x) override { *f64(sum) += dot(f64(x), f64(x), x.size()); }

  void do_clip(const UpdateControl& control, Tensor squares, Tensor loss, double max_norm) override {
    const double norm = std::sqrt(*f64(squares));
    const bool ok = *i32(control.ok) && std::isfinite(*f64(loss)) && std::isfinite(norm);
    *f64(control.norm) = norm;
    *f64(control.clip) = ok ? std::min(1.0, max_norm / (norm + 1e-6)) : 0;
    *i32(control.ok) = ok;
  }

  void do_momentum(Tensor out, Tensor buffer, Tensor grad, const UpdateControl& control, const Momentum& m) override {
    std::fill_n(f64(out), out.size(), 0.0);
    if (!*i32(control.ok)) return;
    for (Index i = 0; i < grad.size(); ++i) {
      const double g = *f64(control.clip) * f64(grad)[i];
      f64(buffer)[i] = m.decay * f64(buffer)[i] + m.grad_in * g;
      f64(out)[i] = m.buffer_out * f64(buffer)[i] + m.grad_out * g;
    }
  }

  // m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2, mhat = m / (1 - b1^t), vhat = v / (1 - b2^t).
  void do_adamw(Tensor step, Tensor exp_avg, Tensor exp_avg_sq, Tensor grad, Tensor lr, const UpdateControl& control,
                const AdamWHyper& hyper, Index t) override {
    std::fill_n(f64(step), step.size(), 0.0);
    if (!*i32(control.ok)) return;
    const double correction1 = 1 - std::pow(hyper.beta1, t), correction2 = 1 - std::pow(hyper.beta2, t);
    for (Index i = 0; i < grad.size(); ++i) {
      const double g = *f64(control.clip) * f64(grad)[i];
      double& m = f64(exp_avg)[i];
      double& v = f64(exp_avg_sq)[i];
      m = hyper.beta1 * m + (1 - hyper.beta1) * g;
      v = hyper.beta2 * v + (1 - hyper.beta2) * g * g;
      f64(step)[i] = -*f64(lr) * (m / correction1) / (std::sqrt(v / correction2) + hyper.eps);
    }
  }

  void do_newton_schulz(std::span<const Tensor> matrices, int steps, double eps, NewtonSchulzPrecision) override {
    for (const Tensor& matrix : matrices) newton_schulz_one(matrix, steps, eps);
  }

  // X = matrix / (||matrix||_F + eps) with rows <= columns; then A = X X^T, X = a X + (b A + c A A) X.
  static void newton_schulz_one(Tensor matrix, int steps, double eps) {
    const Index m = matrix.dim(0), n = matrix.dim(1), rows = std::min(m, n), columns = std::max(m, n);
    const double norm = std::sqrt(dot(f64(matrix), f64(matrix), matrix.size()));
    if (norm == 0) return;
    // element (i, j) of X in the matrix, which is X or its transpose
    const auto at = [&](Index i, Index j) { return m > n ? j * n + i : i * n + j; };

    const auto square = static_cast<std::size_t>(rows * rows);
    std::vector<double> x(static_cast<std::size_t>(matrix.size())), next(x.size()), a(square), polynomial(square);
    for (Index i = 0; i < rows; ++i)
      for (Index j = 0; j < columns; ++j)
        x[static_cast<std::size_t>(i * columns + j)] = f64(matrix)[at(i, j)] / (norm + eps);

    for (int step = 0; step < steps; ++step) {
      for (Index i = 0; i < rows; ++i)
        for (Index j = 0; j < rows; ++j)
          a[static_cast<std::size_t>(i * rows + j)] = dot(x.data() + i * columns, x.data() + j * columns, columns);
      for (Index i = 0; i < rows; ++i)
        for (Index j = 0; j < rows; ++j) {
          const double aa = dot(a.data() + i * rows, a.data() + j * rows, rows);  // A is symmetric
          const auto ij = static_cast<std::size_t>(i * rows + j);
          polynomial[ij] = newton_schulz_b * a[ij] + newton_schulz_c * aa;
        }
      for (Index i = 0; i < rows; ++i)
        for (Index j = 0; j < columns; ++j) {
          const auto ij = static_cast<std::size_t>(i * columns + j);
          next[ij] = newton_schulz_a * x[ij];
          for (Index k = 0; k < rows; ++k)
            next[ij] +=
                polynomial[static_cast<std::size_t>(i * rows + k)] * x[static_cast<std::size_t>(k * columns + j)];
        }
      std::swap(x, next);
    }
    for (Index i = 0; i < rows; ++i)
      for (Index j = 0; j < columns; ++j) f64(matrix)[at(i, j)] = x[static_cast<std::size_t>(i * columns + j)];
  }

  // RN (PAPER 1, 4): x_i / (||x_i||_2 + eps); a zero row stays zero.
  void do_row_normalize(Tensor x, double eps) override {
    const Index d = x.dim(1);
    for (Index i = 0; i < x.dim(0); ++i) {
      double* row = f64(x) + i * d;
      const double norm = std::sqrt(dot(row, row, d));
      if (norm == 0) continue;
      for (Index j = 0; j < d; ++j) row[j] /= norm + eps;
    }
  }

  void do_scale(Tensor x, Tensor factor, double c) override {
    for (Index i = 0; i < x.size(); ++i) f64(x)[i] *= *f64(factor) * c;
  }

  // P X = X - 1 (1^T X) / V (PAPER 1) is column_sum, then subtract_row with c = 1 / V.
  void do_column_sum(Tensor sum, Tensor x) override {
    const Index d = x.dim(1);
    std::fill_n(f64(sum), d, 0.0);
    for (Index i = 0; i < x.dim(0); ++i)
      for (Index j = 0; j < d; ++j) f64(sum)[j] += f64(x)[i * d + j];
  }

  void do_subtract_row(Tensor x, Tensor row, double c) override {
    const Index d = x.dim(1);
    for (Index i = 0; i < x.dim(0); ++i)
      for (Index j = 0; j < d; ++j) f64(x)[i * d + j] -= c * f64(row)[j];
  }

  void do_apply_step(Tensor w, Tensor step, Tensor lr, double weight_decay, const UpdateControl& control) override {
    if (!*i32(control.ok)) return;
    for (Index i = 0; i < w.size(); ++i) f64(w)[i] = (1 - *f64(lr) * weight_decay) * f64(w)[i] + f64(step)[i];
  }

  // ---- measurements (PAPER 1, 5) ----

  // D(S) = max_{i<j} ||s_i - s_j||_2, by looking at every pair; a share's pairs are those with i % shares == share.
  void do_row_diameter(Tensor distance, Tensor pair, Tensor s, Index share, Index shares) override {
    const Index V = s.dim(0), d = s.dim(1);
    for (Index r = 0; r < V; ++r)
      if (!all_finite(f64(s) + r * d, d)) {
        *f64(distance) = std::numeric_limits<double>::quiet_NaN();
        i32(pair)[0] = i32(pair)[1] = static_cast<std::int32_t>(r);
        return;
      }
    double largest = 0;
    i32(pair)[0] = i32(pair)[1] = 0;
    for (Index i = share; i < V; i += shares)
      for (Index j = i + 1; j < V; ++j) {
        double square = 0;
        for (Index c = 0; c < d; ++c) {
          const double difference = f64(s)[i * d + c] - f64(s)[j * d + c];
          square += difference * difference;
        }
        if (square > largest) {
          largest = square;
          i32(pair)[0] = static_cast<std::int32_t>(i);
          i32(pair)[1] = static_cast<std::int32_t>(j);
        }
      }
    *f64(distance) = std::sqrt(largest);
  }

  void do_row_norms(Tensor norms, Tensor s) override {
    const Index d = s.dim(1);
    for (Index i = 0; i < s.dim(0); ++i) f64(norms)[i] = std::sqrt(dot(f64(s) + i * d, f64(s) + i * d, d));
  }

  // range(S h) = max_i (S h)_i - min_i (S h)_i, from its two ends.
  void do_row_range(Tensor lowest, Tensor highest, Tensor h, Tensor s) override {
    const Index V = s.dim(0), d = s.dim(1);
    for (Index p = 0; p < h.dim(0); ++p) {
      double low = std::numeric_limits<double>::infinity(), high = -low;
      for (Index i = 0; i < V; ++i) {
        const double z = dot(f64(s) + i * d, f64(h) + p * d, d);
        if (std::isnan(z)) {
          low = high = z;
          break;
        }
        low = std::min(low, z);
        high = std::max(high, z);
      }
      f64(lowest)[p] = low;
      f64(highest)[p] = high;
    }
  }

 private:
  int processes_;
};

}  // namespace

std::unique_ptr<Backend> make_reference_backend(int processes) { return std::make_unique<ReferenceBackend>(processes); }

}  // namespace rownorm
