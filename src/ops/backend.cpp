// The public operations: shapes and dtypes are checked, and work is counted, here, once, for every backend.
#include "ops/backend.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iterator>
#include <new>
#include <stdexcept>

#include "base/bf16.h"
#include "base/error.h"

namespace rownorm {
namespace {

// The checks of one operation; each throws std::logic_error that begins with the operation's name.
struct Check {
  const char* operation;

  template <class Found>
  [[noreturn]] void wrong(const std::string& name, const Found& found, const std::string& expected) const {
    throw std::logic_error(fmt::format("[{}] {} is {}, expected {}", operation, name, found, expected));
  }

  void that(bool right, const char* name, std::int64_t found, const std::string& expected) const {
    if (!right) wrong(name, found, expected);
  }

  void tensor(const std::string& name, const Tensor& t, DType dtype, const Shape& shape) const {
    if (t.dtype != dtype || t.shape != shape) wrong(name, t.str(), fmt::format("{} {}", shape.str(), name_of(dtype)));
    memory(name, t);
  }
  void scalar(const char* name, const Tensor& t) const { tensor(name, t, DType::f64, {1}); }

  // Operands from which an operation takes its sizes.
  void any_shape(const std::string& name, const Tensor& t, DType dtype) const {
    if (t.dtype != dtype) wrong(name, t.str(), fmt::format("dtype {}", name_of(dtype)));
    memory(name, t);
  }
  void vector(const char* name, const Tensor& t, DType dtype) const {
    if (t.dtype != dtype || t.shape.rank() != 1) wrong(name, t.str(), fmt::format("(rows) {}", name_of(dtype)));
    memory(name, t);
  }
  void matrix(const char* name, const Tensor& t, DType dtype) const {
    if (t.dtype != dtype || t.shape.rank() != 2 || t.dim(1) < 1)
      wrong(name, t.str(), fmt::format("(rows, width >= 1) {}", name_of(dtype)));
    memory(name, t);
  }

  void memory(const std::string& name, const Tensor& t) const {
    if (!t.data && t.size() > 0) wrong(name, t.str() + " without memory", "memory of its own");
  }

  void control(const UpdateControl& c) const {
    scalar("control.norm", c.norm);
    scalar("control.clip", c.clip);
    tensor("control.ok", c.ok, DType::i32, {1});
  }
};

// Tells the observer, if there is one, of the work that is enqueued while this lives.
class Observed {
 public:
  Observed(Observer* observer, const Work& work) : observer_(observer) {
    if (observer_) observer_->begin(work);
  }
  ~Observed() {
    if (observer_) observer_->end();
  }
  Observed(const Observed&) = delete;
  Observed& operator=(const Observed&) = delete;

 private:
  Observer* observer_;
};

template <class... Tensors>
double bytes(const Tensors&... tensors) {
  return static_cast<double>((tensors.bytes() + ...));
}

// FLOPs of a product of (m,k) and (k,n).
double product(std::int64_t m, std::int64_t n, std::int64_t k) {
  return 2 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
}

// Pairs i >= j within sequences of `context` tokens, of all rows.
double causal_pairs(std::int64_t rows, std::int64_t context) {
  return static_cast<double>(rows) * static_cast<double>(context + 1) / 2;
}

bool is_float(DType dtype) { return dtype == DType::f64 || dtype == DType::f32 || dtype == DType::bf16; }

// Sizes that the attention operations read from qkv(N,3d) and a statistic of `parts` values a head.
void check_heads(const Check& check, const Tensor& qkv, const char* name, const Tensor& statistic, std::int64_t parts,
                 std::int64_t context, DType compute, DType master) {
  check.matrix("qkv", qkv, compute);
  check.that(qkv.dim(1) % 3 == 0, "the width of qkv", qkv.dim(1), "a multiple of 3");
  check.matrix(name, statistic, master);
  const std::int64_t d = qkv.dim(1) / 3, columns = statistic.dim(1);
  if (statistic.dim(0) != qkv.dim(0) || columns % parts != 0 || d % (columns / parts) != 0)
    check.wrong(
        name, statistic.str(),
        fmt::format("({}, {}H) with H a divisor of {}", qkv.dim(0), parts == 1 ? "" : std::to_string(parts), d));
  check.that(context >= 1, "the context", context, "at least 1");
  check.that(qkv.dim(0) % context == 0, "the number of rows of qkv", qkv.dim(0),
             fmt::format("a multiple of {}", context));
}

void check_rope(const Check& check, const Tensor& qkv, const Tensor& rstd, const Tensor& rope, DType compute,
                DType master) {
  check.matrix("rope", rope, master);
  check_heads(check, qkv, "rstd", rstd, 2, rope.dim(0), compute, master);
  const std::int64_t head_dim = 2 * qkv.dim(1) / (3 * rstd.dim(1));
  check.that(head_dim % 2 == 0, "head_dim", head_dim, "even");
  check.tensor("rope", rope, master, {rope.dim(0), head_dim});
}

}  // namespace

// ---- timing ----

std::int64_t Backend::mark() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

double Backend::seconds_between(std::int64_t from, std::int64_t to) { return static_cast<double>(to - from) * 1e-9; }

// ---- transport ----

Memory Backend::allocate_host(std::int64_t bytes) {
  static constexpr std::align_val_t alignment{Arena::alignment};
  const auto size = static_cast<std::size_t>(std::max<std::int64_t>(bytes, 1));
  void* memory = ::operator new(size, alignment);
  std::memset(memory, 0, size);
  return Memory(memory, [](void* p) { ::operator delete(p, alignment); });
}

void Backend::upload(Tensor to, const void* host) {
  const Check check{"upload"};
  check.memory("to", to);
  const Observed observed(observer_, {check.operation, 0, 2 * bytes(to)});
  do_upload(to, host);
}

void Backend::download(void* host, Tensor from) {
  const Check check{"download"};
  check.memory("from", from);
  const Observed observed(observer_, {check.operation, 0, 2 * bytes(from)});
  do_download(host, from);
}

Backend::Ticket Backend::start_upload(Tensor to, const void* host) {
  const Check check{"upload"};
  check.memory("to", to);
  const Observed observed(observer_, {check.operation, 0, 2 * bytes(to)});
  return do_start_upload(to, host);
}

Backend::Ticket Backend::start_download(void* host, Tensor from) {
  const Check check{"download"};
  check.memory("from", from);
  const Observed observed(observer_, {check.operation, 0, 2 * bytes(from)});
  return do_start_download(host, from);
}

double Backend::read(Tensor scalar) {
  const Check check{"read"};
  if (scalar.size() != 1) check.wrong("scalar", scalar.str(), "1 element");
  check.memory("scalar", scalar);
  const Observed observed(observer_, {check.operation, 0, 0});
  switch (scalar.dtype) {
    case DType::f64: {
      double value = 0;
      do_download(&value, scalar);
      return value;
    }
    case DType::f32: {
      float value = 0;
      do_download(&value, scalar);
      return value;
    }
    case DType::i32: {
      std::int32_t value = 0;
      do_download(&value, scalar);
      return value;
    }
    case DType::u8: {
      std::uint8_t value = 0;
      do_download(&value, scalar);
      return value;
    }
    case DType::bf16: {
      std::uint16_t bits = 0;
      do_download(&bits, scalar);
      return from_bf16(bits);
    }
  }
  throw std::logic_error("[read] unknown dtype");
}

void Backend::copy(Tensor to, Tensor from) {
  const Check check{"copy"};
  if (to.shape != from.shape) check.wrong("to", to.str(), from.shape.str());
  if (to.dtype != from.dtype && !(is_float(to.dtype) && is_float(from.dtype)))
    check.wrong("to", to.str(), is_float(from.dtype) ? "a float dtype" : name_of(from.dtype));
  check.memory("to", to);
  check.memory("from", from);
  const Observed observed(observer_, {check.operation, 0, bytes(to, from)});
  do_copy(to, from);
}

void Backend::fill(Tensor t, double value) {
  const Check check{"fill"};
  if (t.dtype == DType::u8) check.wrong("t", t.str(), "f64, f32, bf16 or i32");
  check.memory("t", t);
  const Observed observed(observer_, {check.operation, 0, bytes(t)});
  do_fill(t, value);
}

// ---- the model ----

void Backend::embedding(Tensor y, Tensor tokens, Tensor w) {
  const Check check{"embedding"};
  check.matrix("w", w, compute_dtype());
  check.vector("tokens", tokens, DType::i32);
  check.tensor("y", y, compute_dtype(), {tokens.dim(0), w.dim(1)});
  const Observed observed(observer_, {check.operation, 0, 2 * bytes(y) + bytes(tokens)});
  do_embedding(y, tokens, w);
}

void Backend::embedding_backward(Tensor dw, Tensor tokens, Tensor dy) {
  const Check check{"embedding_backward"};
  check.matrix("dw", dw, master_dtype());
  check.vector("tokens", tokens, DType::i32);
  check.tensor("dy", dy, compute_dtype(), {tokens.dim(0), dw.dim(1)});
  const Observed observed(
      observer_, {check.operation, 0, bytes(tokens, dy) + 2 * static_cast<double>(dy.size() * size_of(dw.dtype))});
  do_embedding_backward(dw, tokens, dy);
}

void Backend::rmsnorm(Tensor y, Tensor rstd, Tensor x, double eps) {
  const Check check{"rmsnorm"};
  check.matrix("x", x, compute_dtype());
  check.tensor("y", y, compute_dtype(), x.shape);
  check.tensor("rstd", rstd, master_dtype(), {x.dim(0)});
  const Observed observed(observer_, {check.operation, 0, bytes(y, rstd, x)});
  do_rmsnorm(y, rstd, x, eps);
}

void Backend::rmsnorm_backward(Tensor dx, Tensor dy, Tensor y, Tensor rstd) {
  const Check check{"rmsnorm_backward"};
  check.matrix("y", y, compute_dtype());
  check.tensor("dx", dx, compute_dtype(), y.shape);
  check.tensor("dy", dy, compute_dtype(), y.shape);
  check.tensor("rstd", rstd, master_dtype(), {y.dim(0)});
  const Observed observed(observer_, {check.operation, 0, bytes(dx, dx, dy, y, rstd)});
  do_rmsnorm_backward(dx, dy, y, rstd);
}

void Backend::linear(Tensor y, Tensor x, Tensor w, bool accumulate) {
  const Check check{"linear"};
  check.matrix("x", x, compute_dtype());
  check.matrix("y", y, compute_dtype());
  check.tensor("y", y, compute_dtype(), {x.dim(0), y.dim(1)});
  check.tensor("w", w, compute_dtype(), {y.dim(1), x.dim(1)});
  const Observed observed(observer_, {check.operation,
                                      product(x.dim(0), y.dim(1), x.dim(1)),
                                      bytes(y, x, w) + (accumulate ? bytes(y) : 0),
                                      {x.dim(0), y.dim(1), x.dim(1)}});
  do_linear(y, x, w, accumulate);
}

void Backend::linear_input_grad(Tensor dx, Tensor dy, Tensor w) {
  const Check check{"linear_input_grad"};
  check.matrix("dy", dy, compute_dtype());
  check.matrix("dx", dx, compute_dtype());
  check.tensor("dx", dx, compute_dtype(), {dy.dim(0), dx.dim(1)});
  check.tensor("w", w, compute_dtype(), {dy.dim(1), dx.dim(1)});
  const Observed observed(
      observer_,
      {check.operation, product(dx.dim(0), dx.dim(1), dy.dim(1)), bytes(dx, dy, w), {dx.dim(0), dy.dim(1), dx.dim(1)}});
  do_linear_input_grad(dx, dy, w);
}

void Backend::linear_weight_grad(Tensor dw, Tensor dy, Tensor x) {
  const Check check{"linear_weight_grad"};
  check.matrix("dy", dy, compute_dtype());
  check.matrix("x", x, compute_dtype());
  check.tensor("x", x, compute_dtype(), {dy.dim(0), x.dim(1)});
  check.tensor("dw", dw, master_dtype(), {dy.dim(1), x.dim(1)});
  const Observed observed(observer_, {check.operation,
                                      product(dw.dim(0), dw.dim(1), x.dim(0)),
                                      bytes(dw, dw, dy, x),
                                      {x.dim(0), dw.dim(0), dw.dim(1)}});
  do_linear_weight_grad(dw, dy, x);
}

void Backend::qk_norm_rope(Tensor qkv, Tensor rstd, Tensor rope, double eps) {
  const Check check{"qk_norm_rope"};
  check_rope(check, qkv, rstd, rope, compute_dtype(), master_dtype());
  const Observed observed(observer_, {check.operation, 0, bytes(qkv, qkv) * 2 / 3 + bytes(rstd, rope)});
  do_qk_norm_rope(qkv, rstd, rope, eps);
}

void Backend::qk_norm_rope_backward(Tensor dqkv, Tensor qkv, Tensor rstd, Tensor rope) {
  const Check check{"qk_norm_rope_backward"};
  check_rope(check, qkv, rstd, rope, compute_dtype(), master_dtype());
  check.tensor("dqkv", dqkv, compute_dtype(), qkv.shape);
  const Observed observed(observer_, {check.operation, 0, bytes(dqkv, dqkv, qkv) * 2 / 3 + bytes(rstd, rope)});
  do_qk_norm_rope_backward(dqkv, qkv, rstd, rope);
}

void Backend::attention(Tensor att, Tensor lse, Tensor qkv, std::int64_t context) {
  const Check check{"attention"};
  check_heads(check, qkv, "lse", lse, 1, context, compute_dtype(), master_dtype());
  check.tensor("att", att, compute_dtype(), {qkv.dim(0), qkv.dim(1) / 3});
  const Observed observed(
      observer_,
      {check.operation, 2 * product(1, 1, att.dim(1)) * causal_pairs(att.dim(0), context), bytes(att, lse, qkv)});
  do_attention(att, lse, qkv, context);
}

void Backend::attention_backward(Tensor dqkv, Tensor datt, Tensor att, Tensor lse, Tensor qkv, std::int64_t context) {
  const Check check{"attention_backward"};
  check_heads(check, qkv, "lse", lse, 1, context, compute_dtype(), master_dtype());
  check.tensor("dqkv", dqkv, compute_dtype(), qkv.shape);
  check.tensor("datt", datt, compute_dtype(), {qkv.dim(0), qkv.dim(1) / 3});
  check.tensor("att", att, compute_dtype(), datt.shape);
  const Observed observed(observer_,
                          {check.operation, 5 * product(1, 1, att.dim(1)) * causal_pairs(att.dim(0), context),
                           bytes(dqkv, datt, att, lse, qkv)});
  do_attention_backward(dqkv, datt, att, lse, qkv, context);
}

void Backend::cached_attention(Tensor att, Tensor keys, Tensor values, Tensor qkv, std::int64_t position,
                               std::int64_t head_dim) {
  const Check check{"cached_attention"};
  check.matrix("att", att, compute_dtype());
  const std::int64_t n = att.dim(0), d = att.dim(1);
  check.tensor("qkv", qkv, compute_dtype(), {n, 3 * d});
  check.that(head_dim >= 1 && d % head_dim == 0, "head_dim", head_dim, fmt::format("a divisor of {}", d));
  check.matrix("keys", keys, compute_dtype());
  check.tensor("keys", keys, compute_dtype(), {keys.dim(0), d});
  check.tensor("values", values, compute_dtype(), keys.shape);
  check.that(position >= 0 && position <= keys.dim(0) - n, "the position", position,
             fmt::format("in [0, {}]: {} rows of keys for {} new ones", keys.dim(0) - n, keys.dim(0), n));
  // Row i of the new ones sees position + i + 1 keys: two products of d each.
  const double pairs = static_cast<double>(n) * (static_cast<double>(position) + (static_cast<double>(n) + 1) / 2);
  const Observed observed(observer_, {check.operation, 4 * static_cast<double>(d) * pairs,
                                      bytes(att, qkv) + 2 * bytes(keys.rows(0, position + n))});
  do_cached_attention(att, keys, values, qkv, position, head_dim);
}

void Backend::swiglu(Tensor y, Tensor gate_up) {
  const Check check{"swiglu"};
  check.matrix("y", y, compute_dtype());
  check.tensor("gate_up", gate_up, compute_dtype(), {y.dim(0), 2 * y.dim(1)});
  const Observed observed(observer_, {check.operation, 0, bytes(y, gate_up)});
  do_swiglu(y, gate_up);
}

void Backend::swiglu_backward(Tensor dgate_up, Tensor dy, Tensor gate_up) {
  const Check check{"swiglu_backward"};
  check.matrix("dy", dy, compute_dtype());
  check.tensor("gate_up", gate_up, compute_dtype(), {dy.dim(0), 2 * dy.dim(1)});
  check.tensor("dgate_up", dgate_up, compute_dtype(), gate_up.shape);
  const Observed observed(observer_, {check.operation, 0, bytes(dgate_up, dy, gate_up)});
  do_swiglu_backward(dgate_up, dy, gate_up);
}

void Backend::head_loss(Tensor loss, Tensor dh, Tensor dw, Tensor h, Tensor w, Tensor targets, double scale) {
  const Check check{"head_loss"};
  check.scalar("loss", loss);
  check.matrix("h", h, compute_dtype());
  check.matrix("w", w, compute_dtype());
  check.tensor("w", w, compute_dtype(), {w.dim(0), h.dim(1)});
  check.tensor("targets", targets, DType::i32, {h.dim(0)});
  check.tensor("dh", dh, compute_dtype(), h.shape);
  check.tensor("dw", dw, master_dtype(), w.shape);
  const Observed observed(observer_, {check.operation,
                                      3 * product(h.dim(0), w.dim(0), h.dim(1)),
                                      bytes(dh, dw, dw, h, w, targets),
                                      {h.dim(0), w.dim(0), h.dim(1)}});
  do_head_loss(loss, dh, dw, h, w, targets, scale);
}

void Backend::head_loss(Tensor loss, Tensor h, Tensor w, Tensor targets, double scale) {
  const Check check{"head_loss"};
  check.scalar("loss", loss);
  check.matrix("h", h, compute_dtype());
  check.matrix("w", w, compute_dtype());
  check.tensor("w", w, compute_dtype(), {w.dim(0), h.dim(1)});
  check.tensor("targets", targets, DType::i32, {h.dim(0)});
  const Observed observed(
      observer_,
      {check.operation, product(h.dim(0), w.dim(0), h.dim(1)), bytes(h, w, targets), {h.dim(0), w.dim(0), h.dim(1)}});
  do_head_loss(loss, Tensor{}, Tensor{}, h, w, targets, scale);
}

// ---- the update ----

void Backend::squared_norm(Tensor sum, Tensor x) {
  const Check check{"squared_norm"};
  check.scalar("sum", sum);
  check.any_shape("x", x, master_dtype());
  const Observed observed(observer_, {check.operation, 0, bytes(x)});
  do_squared_norm(sum, x);
}

void Backend::clip(const UpdateControl& control, Tensor squares, Tensor loss, double max_norm) {
  const Check check{"clip"};
  check.control(control);
  check.scalar("squares", squares);
  check.scalar("loss", loss);
  if (!(max_norm > 0)) check.wrong("max_norm", max_norm, "more than 0");
  const Observed observed(observer_, {check.operation, 0, 0});
  do_clip(control, squares, loss, max_norm);
}

void Backend::momentum(Tensor out, Tensor buffer, Tensor grad, const UpdateControl& control, const Momentum& m) {
  const Check check{"momentum"};
  check.any_shape("grad", grad, master_dtype());
  check.tensor("out", out, master_dtype(), grad.shape);
  check.tensor("buffer", buffer, master_dtype(), grad.shape);
  check.control(control);
  const Observed observed(observer_, {check.operation, 0, bytes(out, buffer, buffer, grad)});
  do_momentum(out, buffer, grad, control, m);
}

void Backend::adamw(Tensor step, Tensor exp_avg, Tensor exp_avg_sq, Tensor grad, Tensor lr,
                    const UpdateControl& control, const AdamWHyper& hyper, std::int64_t t) {
  const Check check{"adamw"};
  check.any_shape("grad", grad, master_dtype());
  check.tensor("step", step, master_dtype(), grad.shape);
  check.tensor("exp_avg", exp_avg, master_dtype(), grad.shape);
  check.tensor("exp_avg_sq", exp_avg_sq, master_dtype(), grad.shape);
  check.scalar("lr", lr);
  check.control(control);
  check.that(t >= 1, "t", t, "at least 1");
  const Observed observed(observer_, {check.operation, 0, bytes(step, exp_avg, exp_avg, exp_avg_sq, exp_avg_sq, grad)});
  do_adamw(step, exp_avg, exp_avg_sq, grad, lr, control, hyper, t);
}

const char* name_of(NewtonSchulzPrecision precision) {
  return precision == NewtonSchulzPrecision::fp32 ? "fp32" : precision == NewtonSchulzPrecision::tf32 ? "tf32" : "bf16";
}

void Backend::newton_schulz(std::span<const Tensor> matrices, int steps, double eps, NewtonSchulzPrecision precision) {
  const Check check{"newton_schulz"};
  if (!has(precision)) check.wrong("precision", name_of(precision), "fp32 on " + name());
  check.that(steps >= 0, "steps", steps, "at least 0");
  if (matrices.empty()) return;
  check.matrix("matrix 0", matrices[0], master_dtype());
  for (std::size_t i = 1; i < matrices.size(); ++i)
    check.tensor(fmt::format("matrix {}", i), matrices[i], master_dtype(), matrices[0].shape);
  const auto [s, l] = std::minmax({matrices[0].dim(0), matrices[0].dim(1)});
  const auto count = static_cast<double>(matrices.size());
  const Observed observed(observer_, {check.operation,
                                      count * steps * (2 * product(s, s, l) + product(s, s, s)),
                                      count * bytes(matrices[0], matrices[0]),
                                      {std::ssize(matrices), matrices[0].dim(0), matrices[0].dim(1), steps}});
  do_newton_schulz(matrices, steps, eps, precision);
}

void Backend::row_normalize(Tensor x, double eps) {
  const Check check{"row_normalize"};
  check.matrix("x", x, master_dtype());
  const Observed observed(observer_, {check.operation, 0, bytes(x, x)});
  do_row_normalize(x, eps);
}

void Backend::scale(Tensor x, Tensor factor, double c) {
  const Check check{"scale"};
  check.any_shape("x", x, master_dtype());
  check.scalar("factor", factor);
  const Observed observed(observer_, {check.operation, 0, bytes(x, x)});
  do_scale(x, factor, c);
}

void Backend::column_sum(Tensor sum, Tensor x) {
  const Check check{"column_sum"};
  check.matrix("x", x, master_dtype());
  check.tensor("sum", sum, DType::f64, {x.dim(1)});
  const Observed observed(observer_, {check.operation, 0, bytes(sum, x)});
  do_column_sum(sum, x);
}

void Backend::subtract_row(Tensor x, Tensor row, double c) {
  const Check check{"subtract_row"};
  check.matrix("x", x, master_dtype());
  check.tensor("row", row, DType::f64, {x.dim(1)});
  const Observed observed(observer_, {check.operation, 0, bytes(x, x, row)});
  do_subtract_row(x, row, c);
}

void Backend::apply_step(Tensor w, Tensor step, Tensor lr, double weight_decay, const UpdateControl& control) {
  const Check check{"apply_step"};
  check.any_shape("w", w, master_dtype());
  check.tensor("step", step, master_dtype(), w.shape);
  check.scalar("lr", lr);
  check.control(control);
  const Observed observed(observer_, {check.operation, 0, bytes(w, w, step)});
  do_apply_step(w, step, lr, weight_decay, control);
}

// ---- measurements ----

void Backend::row_diameter(Tensor distance, Tensor pair, Tensor s, std::int64_t share, std::int64_t shares) {
  const Check check{"row_diameter"};
  check.scalar("distance", distance);
  check.tensor("pair", pair, DType::i32, {2});
  check.matrix("s", s, master_dtype());
  check.that(shares >= 1, "shares", shares, "at least 1");
  check.that(share >= 0 && share < shares, "share", share, fmt::format("in [0, {})", shares));
  const Observed observed(
      observer_,
      {check.operation, product(s.dim(0), s.dim(0) - 1, s.dim(1)) / (2 * static_cast<double>(shares)), bytes(s)});
  do_row_diameter(distance, pair, s, share, shares);
}

void Backend::row_norms(Tensor norms, Tensor s) {
  const Check check{"row_norms"};
  check.matrix("s", s, master_dtype());
  check.tensor("norms", norms, DType::f64, {s.dim(0)});
  const Observed observed(observer_, {check.operation, 0, bytes(norms, s)});
  do_row_norms(norms, s);
}

void Backend::row_range(Tensor lowest, Tensor highest, Tensor h, Tensor s) {
  const Check check{"row_range"};
  check.matrix("h", h, compute_dtype());
  check.matrix("s", s, master_dtype());
  check.tensor("s", s, master_dtype(), {s.dim(0), h.dim(1)});
  check.tensor("lowest", lowest, master_dtype(), {h.dim(0)});
  check.tensor("highest", highest, master_dtype(), {h.dim(0)});
  const Observed observed(observer_, {check.operation,
                                      product(h.dim(0), s.dim(0), h.dim(1)),
                                      bytes(lowest, highest, h, s),
                                      {h.dim(0), s.dim(0), h.dim(1)}});
  do_row_range(lowest, highest, h, s);
}

Memory allocate_plan(Backend& be, const Arena& plan) {
  try {
    return be.allocate(plan.bytes());
  } catch (const Error& e) {
    fail(e.code(), "{}; the plan: {}", e.what(), describe(plan));
  }
}

Memory allocate_tensors(Backend& be, const std::function<void(Arena&)>& build) {
  Arena plan;
  build(plan);
  Memory memory = allocate_plan(be, plan);
  Arena arena(memory.get(), plan.bytes());
  build(arena);
  return memory;
}

}  // namespace rownorm
