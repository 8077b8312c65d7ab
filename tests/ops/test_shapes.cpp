// Every operation checks every operand: a table of right calls, from which all wrong ones follow. A new operation needs
// a row here.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <iterator>
#include <stdexcept>
#include <vector>

#include "ops/backend.h"

namespace rownorm {
namespace {

// Remembers what reached it. Three dtypes that differ, so that no two are taken for each other.
class Recorder final : public Backend {
 public:
  std::string reached;

  std::string name() const override { return "recorder"; }
  std::string description() const override { return name(); }
  DType compute_dtype() const override { return DType::bf16; }
  DType master_dtype() const override { return DType::f32; }
  Memory allocate(std::int64_t) override { return nullptr; }
  std::int64_t workspace_bytes(const WorkspaceSizes&) const override { return 0; }
  void set_workspace(Tensor, const WorkspaceSizes&) override {}
  std::int64_t logits_chunk() const override { return 1; }

 protected:
  using T = Tensor;
  void do_upload(T, const void*) override { reached = "upload"; }
  void do_download(void*, T) override { reached = "download"; }
  void do_copy(T, T) override { reached = "copy"; }
  void do_fill(T, double) override { reached = "fill"; }
  void do_embedding(T, T, T) override { reached = "embedding"; }
  void do_embedding_backward(T, T, T) override { reached = "embedding_backward"; }
  void do_rmsnorm(T, T, T, double) override { reached = "rmsnorm"; }
  void do_rmsnorm_backward(T, T, T, T) override { reached = "rmsnorm_backward"; }
  void do_linear(T, T, T, bool) override { reached = "linear"; }
  void do_linear_input_grad(T, T, T) override { reached = "linear_input_grad"; }
  void do_linear_weight_grad(T, T, T) override { reached = "linear_weight_grad"; }
  void do_qk_norm_rope(T, T, T, double) override { reached = "qk_norm_rope"; }
  void do_qk_norm_rope_backward(T, T, T, T) override { reached = "qk_norm_rope_backward"; }
  void do_attention(T, T, T, std::int64_t) override { reached = "attention"; }
  void do_attention_backward(T, T, T, T, T, std::int64_t) override { reached = "attention_backward"; }
  void do_cached_attention(T, T, T, T, std::int64_t, std::int64_t) override { reached = "cached_attention"; }
  void do_swiglu(T, T) override { reached = "swiglu"; }
  void do_swiglu_backward(T, T, T) override { reached = "swiglu_backward"; }
  void do_head_loss(T, T, T, T, T, T, double) override { reached = "head_loss"; }
  void do_squared_norm(T, T) override { reached = "squared_norm"; }
  void do_clip(const UpdateControl&, T, T, double) override { reached = "clip"; }
  void do_momentum(T, T, T, const UpdateControl&, const Momentum&) override { reached = "momentum"; }
  void do_adamw(T, T, T, T, T, const UpdateControl&, const AdamWHyper&, std::int64_t) override { reached = "adamw"; }
  void do_newton_schulz(std::span<const T>, int, double, NewtonSchulzPrecision) override { reached = "newton_schulz"; }
  void do_row_normalize(T, double) override { reached = "row_normalize"; }
  void do_scale(T, T, double) override { reached = "scale"; }
  void do_column_sum(T, T) override { reached = "column_sum"; }
  void do_subtract_row(T, T, double) override { reached = "subtract_row"; }
  void do_apply_step(T, T, T, double, const UpdateControl&) override { reached = "apply_step"; }
  void do_row_diameter(T, T, T, std::int64_t, std::int64_t) override { reached = "row_diameter"; }
  void do_row_norms(T, T) override { reached = "row_norms"; }
  void do_row_range(T, T, T, T) override { reached = "row_range"; }
};

constexpr DType compute = DType::bf16, master = DType::f32, f64 = DType::f64, i32 = DType::i32;

struct Operand {
  DType dtype;
  Shape shape;
  std::string free = "";  // dimensions that this operand alone decides ("0", "01"), or "any" shape
};

using Operands = std::vector<Tensor>;

struct Case {
  const char* operation;
  std::vector<Operand> operands;
  std::function<void(Backend&, const Operands&)> call;
};

// N = 14 tokens in sequences of T = 7, d = 18 = 9 heads of 2 (neither 8 nor 10 divides 18), F = 5, V = 11, P = 4.
const Operand control_norm{f64, {1}}, control_clip{f64, {1}}, control_ok{i32, {1}}, scalar{f64, {1}};
const Operand tokens{i32, {14}}, hidden{compute, {14, 18}}, qkv{compute, {14, 54}}, rope{master, {7, 2}};
const Operand weight{master, {11, 18}};

UpdateControl control(const Operands& o, std::size_t i) { return {o[i], o[i + 1], o[i + 2]}; }

const std::vector<Case>& cases() {
  static const std::vector<Case> all{
      {"embedding",
       {hidden, tokens, {compute, {11, 18}, "0"}},
       [](Backend& be, const Operands& o) { be.embedding(o[0], o[1], o[2]); }},
      {"embedding_backward",
       {{master, {11, 18}, "0"}, tokens, hidden},
       [](Backend& be, const Operands& o) { be.embedding_backward(o[0], o[1], o[2]); }},
      {"rmsnorm",
       {hidden, {master, {14}}, hidden},
       [](Backend& be, const Operands& o) { be.rmsnorm(o[0], o[1], o[2], 1e-6); }},
      {"rmsnorm_backward",
       {hidden, hidden, hidden, {master, {14}}},
       [](Backend& be, const Operands& o) { be.rmsnorm_backward(o[0], o[1], o[2], o[3]); }},
      {"linear",
       {{compute, {14, 5}}, hidden, {compute, {5, 18}}},
       [](Backend& be, const Operands& o) { be.linear(o[0], o[1], o[2]); }},
      {"linear_input_grad",
       {hidden, {compute, {14, 5}}, {compute, {5, 18}}},
       [](Backend& be, const Operands& o) { be.linear_input_grad(o[0], o[1], o[2]); }},
      {"linear_weight_grad",
       {{master, {5, 18}}, {compute, {14, 5}}, hidden},
       [](Backend& be, const Operands& o) { be.linear_weight_grad(o[0], o[1], o[2]); }},
      {"qk_norm_rope",
       {qkv, {master, {14, 18}}, rope},
       [](Backend& be, const Operands& o) { be.qk_norm_rope(o[0], o[1], o[2], 1e-6); }},
      {"qk_norm_rope_backward",
       {qkv, qkv, {master, {14, 18}}, rope},
       [](Backend& be, const Operands& o) { be.qk_norm_rope_backward(o[0], o[1], o[2], o[3]); }},
      {"attention",
       {hidden, {master, {14, 9}}, qkv},
       [](Backend& be, const Operands& o) { be.attention(o[0], o[1], o[2], 7); }},
      {"attention_backward",
       {qkv, hidden, hidden, {master, {14, 9}}, qkv},
       [](Backend& be, const Operands& o) { be.attention_backward(o[0], o[1], o[2], o[3], o[4], 7); }},
      {"cached_attention",  // T = 17: 3 positions before the 14 new ones
       {hidden, {compute, {17, 18}}, {compute, {17, 18}}, qkv},
       [](Backend& be, const Operands& o) { be.cached_attention(o[0], o[1], o[2], o[3], 3, 2); }},
      {"swiglu",
       {{compute, {14, 5}}, {compute, {14, 10}}},
       [](Backend& be, const Operands& o) { be.swiglu(o[0], o[1]); }},
      {"swiglu_backward",
       {{compute, {14, 10}}, {compute, {14, 5}}, {compute, {14, 10}}},
       [](Backend& be, const Operands& o) { be.swiglu_backward(o[0], o[1], o[2]); }},
      {"head_loss",
       {scalar, hidden, {master, {11, 18}}, hidden, {compute, {11, 18}}, tokens},
       [](Backend& be, const Operands& o) { be.head_loss(o[0], o[1], o[2], o[3], o[4], o[5], 1); }},
      {"head_loss",
       {scalar, hidden, {compute, {11, 18}, "0"}, tokens},
       [](Backend& be, const Operands& o) { be.head_loss(o[0], o[1], o[2], o[3], 1); }},
      {"squared_norm",
       {scalar, {master, {11, 18}, "any"}},
       [](Backend& be, const Operands& o) { be.squared_norm(o[0], o[1]); }},
      {"clip",
       {control_norm, control_clip, control_ok, scalar, scalar},
       [](Backend& be, const Operands& o) { be.clip(control(o, 0), o[3], o[4], 1); }},
      {"momentum",
       {weight, weight, weight, control_norm, control_clip, control_ok},
       [](Backend& be, const Operands& o) {
         be.momentum(o[0], o[1], o[2], control(o, 3), {0.95, 1, 0.95, 1});
       }},
      {"adamw",
       {weight, weight, weight, weight, scalar, control_norm, control_clip, control_ok},
       [](Backend& be, const Operands& o) {
         be.adamw(o[0], o[1], o[2], o[3], o[4], control(o, 5), {0.9, 0.999, 1e-10}, 1);
       }},
      {"newton_schulz", {weight, weight, weight}, [](Backend& be, const Operands& o) { be.newton_schulz(o, 5, 1e-5); }},
      {"row_normalize",
       {{master, {11, 18}, "01"}},
       [](Backend& be, const Operands& o) { be.row_normalize(o[0], 1e-8); }},
      {"scale", {{master, {11, 18}, "any"}, scalar}, [](Backend& be, const Operands& o) { be.scale(o[0], o[1], 2); }},
      {"column_sum",
       {{f64, {18}}, {master, {11, 18}, "0"}},
       [](Backend& be, const Operands& o) { be.column_sum(o[0], o[1]); }},
      {"subtract_row",
       {{master, {11, 18}, "0"}, {f64, {18}}},
       [](Backend& be, const Operands& o) { be.subtract_row(o[0], o[1], 1); }},
      {"apply_step",
       {weight, weight, scalar, control_norm, control_clip, control_ok},
       [](Backend& be, const Operands& o) { be.apply_step(o[0], o[1], o[2], 0.1, control(o, 3)); }},
      {"row_diameter",
       {scalar, {i32, {2}}, {master, {11, 18}, "01"}},
       [](Backend& be, const Operands& o) { be.row_diameter(o[0], o[1], o[2]); }},
      {"row_norms",
       {{f64, {11}}, {master, {11, 18}, "1"}},
       [](Backend& be, const Operands& o) { be.row_norms(o[0], o[1]); }},
      {"row_range",
       {{master, {4}}, {master, {4}}, {compute, {4, 18}}, {master, {11, 18}, "0"}},
       [](Backend& be, const Operands& o) { be.row_range(o[0], o[1], o[2], o[3]); }},
  };
  return all;
}

class Shapes : public testing::Test {
 protected:
  Recorder be;
  double memory = 0;  // no operation touches it

  Operands right(const Case& c) {
    Operands o;
    for (const Operand& operand : c.operands) o.push_back({&memory, operand.dtype, operand.shape});
    return o;
  }

  // "" if the call went through to the backend, else what the check said.
  std::string message(const Case& c, const Operands& operands) {
    be.reached = "";
    try {
      c.call(be, operands);
    } catch (const std::logic_error& error) {
      EXPECT_EQ(be.reached, "") << c.operation;
      EXPECT_EQ(std::string(error.what()).find(std::string("[") + c.operation + "] "), 0U) << error.what();
      return error.what();
    }
    EXPECT_EQ(be.reached, c.operation);
    return "";
  }

  void expect_refused(const Case& c, std::size_t operand, const Tensor& wrong) {
    Operands o = right(c);
    o[operand] = wrong;
    EXPECT_NE(message(c, o).find(", expected "), std::string::npos)
        << c.operation << " took operand " << operand << " as " << wrong.str();
  }
};

Shape with(const Shape& shape, int dim, std::int64_t size) {
  if (shape.rank() == 1) return {size};
  return dim == 0 ? Shape{size, shape[1]} : Shape{shape[0], size};
}

TEST_F(Shapes, RightCallsReachTheBackend) {
  for (const Case& c : cases()) EXPECT_EQ(message(c, right(c)), "");
}

TEST_F(Shapes, WrongDtypesAreRefused) {
  for (const Case& c : cases())
    for (std::size_t i = 0; i < c.operands.size(); ++i)
      for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::i32, DType::u8}) {
        Tensor t = right(c)[i];
        if (t.dtype == dtype) continue;
        t.dtype = dtype;
        expect_refused(c, i, t);
      }
}

TEST_F(Shapes, WrongDimensionsAreRefused) {
  for (const Case& c : cases())
    for (std::size_t i = 0; i < c.operands.size(); ++i)
      for (int dim = 0; dim < c.operands[i].shape.rank(); ++dim)
        for (const int change : {-1, 1}) {
          Tensor t = right(c)[i];
          t.shape = with(t.shape, dim, t.dim(dim) + change);
          Operands o = right(c);
          o[i] = t;
          const std::string& free = c.operands[i].free;
          if (free == "any" || free.find(std::to_string(dim)) != std::string::npos)
            EXPECT_EQ(message(c, o), "");
          else
            expect_refused(c, i, t);
        }
}

TEST_F(Shapes, WrongRanksAreRefused) {
  for (const Case& c : cases())
    for (std::size_t i = 0; i < c.operands.size(); ++i) {
      if (c.operands[i].free == "any") continue;
      Tensor t = right(c)[i];
      t.shape = t.shape.rank() == 1 ? Shape{t.size(), 1} : Shape{t.size()};
      expect_refused(c, i, t);
      t.shape = {};
      expect_refused(c, i, t);
    }
}

TEST_F(Shapes, TensorsWithoutMemoryAreRefused) {
  for (const Case& c : cases())
    for (std::size_t i = 0; i < c.operands.size(); ++i) {
      Tensor t = right(c)[i];
      t.data = nullptr;
      expect_refused(c, i, t);
    }
}

TEST_F(Shapes, NoRowsNeedNoMemory) {
  const Tensor none{nullptr, master, {0, 18}}, sum{&memory, f64, {18}};
  EXPECT_NO_THROW(be.column_sum(sum, none));
  EXPECT_THROW(be.column_sum({&memory, f64, {0}}, {nullptr, master, {4, 0}}), std::logic_error);  // but no width 0
}

// What an observer is told of the calls above, counted by hand: bf16 operands of 2 bytes, master ones of 4.
struct Expected {
  const char* operation;
  double flops, bytes;
  Shape sizes = {};
};

const Expected expected_work[] = {
    {"embedding", 0, 14 * 18 * (2 + 2) + 14 * 4},                 // rows read and written, token ids
    {"embedding_backward", 0, 14 * 18 * (2 + 4 + 4) + 14 * 4},    // dy read, rows of dw read and written
    {"rmsnorm", 0, 14 * 18 * (2 + 2) + 14 * 4},                   // x, y, rstd
    {"rmsnorm_backward", 0, 14 * 18 * (2 + 2 + 2 + 2) + 14 * 4},  // dx twice, dy, y, rstd
    {"linear", 2 * 14 * 5 * 18, 2 * (14 * 5 + 14 * 18 + 5 * 18), {14, 5, 18}},
    {"linear_input_grad", 2 * 14 * 5 * 18, 2 * (14 * 5 + 14 * 18 + 5 * 18), {14, 5, 18}},
    {"linear_weight_grad", 2 * 14 * 5 * 18, 2 * (14 * 5 + 14 * 18) + 2 * 4 * 5 * 18, {14, 5, 18}},
    {"qk_norm_rope", 0, 2 * 2 * 14 * 36 + 4 * 14 * 18 + 4 * 7 * 2},           // q and k in place; rstd; rope
    {"qk_norm_rope_backward", 0, 3 * 2 * 14 * 36 + 4 * 14 * 18 + 4 * 7 * 2},  // and q and k of qkv
    // Two sequences of 7 * 8 / 2 = 28 pairs, 18 multiply-adds each for q k^T, and again for p v.
    {"attention", 2 * 56 * 18 * 2, 2 * (14 * 18 + 14 * 54) + 4 * 14 * 9},
    {"attention_backward", 5 * 56 * 18 * 2, 2 * (2 * 14 * 18 + 2 * 14 * 54) + 4 * 14 * 9},
    {"cached_attention", 4 * 147 * 18, 2 * (14 * 18 + 14 * 54 + 2 * 17 * 18)},  // 4 + 5 + ... + 17 keys
    {"swiglu", 0, 2 * 14 * (5 + 10)},
    {"swiglu_backward", 0, 2 * 14 * (10 + 5 + 10)},
    {"head_loss", 3 * 2 * 14 * 11 * 18, 2 * (14 * 18 * 2 + 11 * 18) + 2 * 4 * 11 * 18 + 14 * 4, {14, 11, 18}},
    {"head_loss", 2 * 14 * 11 * 18, 2 * (14 * 18 + 11 * 18) + 14 * 4, {14, 11, 18}},  // forward only
    {"squared_norm", 0, 4 * 198},
    {"clip", 0, 0},
    {"momentum", 0, 4 * 4 * 198},
    {"adamw", 0, 6 * 4 * 198},
    // Three matrices, five times A = x x^T (side 11), A A and A x; each matrix read and written once.
    {"newton_schulz", 3 * 5 * 2 * (11 * 11 * 18 + 11 * 11 * 11 + 11 * 11 * 18), 3 * 2 * 4 * 198, {3, 11, 18, 5}},
    {"row_normalize", 0, 2 * 4 * 198},
    {"scale", 0, 2 * 4 * 198},
    {"column_sum", 0, 4 * 198 + 8 * 18},
    {"subtract_row", 0, 2 * 4 * 198 + 8 * 18},
    {"apply_step", 0, 3 * 4 * 198},
    {"row_diameter", 2 * 55 * 18, 4 * 198},  // 11 * 10 / 2 pairs
    {"row_norms", 0, 4 * 198 + 8 * 11},
    {"row_range", 2 * 4 * 11 * 18, 2 * 4 * 18 + 4 * 198 + 2 * 4 * 4, {4, 11, 18}},
};

// Notes that the backend's own work happens between begin and end.
class Witness final : public Observer {
 public:
  explicit Witness(const Recorder& be) : be_(be) {}
  void begin(const Work& work) override {
    EXPECT_EQ(be_.reached, "");
    seen.push_back(work);
  }
  void end() override { EXPECT_EQ(be_.reached, seen.back().operation); }
  std::vector<Work> seen;

 private:
  const Recorder& be_;
};

TEST_F(Shapes, ObserversAreToldOfTheWork) {
  Witness witness(be);
  be.observe(&witness);
  for (const Case& c : cases()) EXPECT_EQ(message(c, right(c)), "");
  ASSERT_EQ(witness.seen.size(), std::size(expected_work));
  for (std::size_t i = 0; i < witness.seen.size(); ++i) {
    const Work& work = witness.seen[i];
    const Expected& expected = expected_work[i];
    EXPECT_STREQ(work.operation, expected.operation);
    EXPECT_EQ(work.flops, expected.flops) << work.operation;
    EXPECT_EQ(work.bytes, expected.bytes) << work.operation;
    EXPECT_EQ(work.sizes, expected.sizes) << work.operation;
  }

  witness.seen.clear();
  Operands wrong = right(cases()[0]);
  wrong[0].shape = {1};
  EXPECT_NE(message(cases()[0], wrong), "");  // a refused call is no work
  be.observe(nullptr);
  EXPECT_EQ(message(cases()[0], right(cases()[0])), "");
  EXPECT_TRUE(witness.seen.empty());
}

TEST_F(Shapes, ObserversAreToldOfTransport) {
  Witness witness(be);
  const Tensor wide{&memory, f64, {3}}, narrow{&memory, compute, {3}};
  be.observe(&witness);
  const auto bytes = [&](const std::function<void()>& call) {
    be.reached = "";
    call();
    return witness.seen.back().bytes;
  };
  EXPECT_EQ(bytes([&] { be.copy(narrow, wide); }), 3 * (2 + 8));
  EXPECT_EQ(bytes([&] { be.fill(wide, 0); }), 3 * 8);
  EXPECT_EQ(bytes([&] { be.upload(wide, &memory); }), 2 * 3 * 8);  // read on one side, written on the other
  EXPECT_EQ(bytes([&] { be.download(&memory, wide); }), 2 * 3 * 8);
  EXPECT_EQ(bytes([&] { be.start_upload(wide, &memory); }), 2 * 3 * 8);
  EXPECT_EQ(bytes([&] { be.start_download(&memory, wide); }), 2 * 3 * 8);
  EXPECT_EQ(witness.seen.size(), 6u);
}

class Messages : public Shapes {
 protected:
  Tensor tensor(DType dtype, Shape shape) { return {&memory, dtype, shape}; }
  std::string of(const std::function<void()>& call) {
    try {
      call();
    } catch (const std::logic_error& error) {
      return error.what();
    }
    return "nothing was thrown";
  }
};

TEST_F(Messages, SayWhatWhichAndWhatWouldBeRight) {
  const Tensor x = tensor(compute, {3, 5}), rstd = tensor(master, {3});
  EXPECT_EQ(of([&] {
              be.rmsnorm(tensor(compute, {3, 4}), rstd, x, 1e-6);
            }),
            "[rmsnorm] y is (3, 4) bf16, expected (3, 5) bf16");
  EXPECT_EQ(of([&] { be.rmsnorm(x, tensor(f64, {3}), x, 1e-6); }), "[rmsnorm] rstd is (3) f64, expected (3) f32");
  EXPECT_EQ(of([&] { be.rmsnorm(x, rstd, tensor(compute, {3}), 1e-6); }),
            "[rmsnorm] x is (3) bf16, expected (rows, width >= 1) bf16");
  EXPECT_EQ(of([&] {
              be.rmsnorm({nullptr, compute, {3, 5}}, rstd, x, 1e-6);
            }),
            "[rmsnorm] y is (3, 5) bf16 without memory, expected memory of its own");
}

TEST_F(Messages, AttentionNeedsWholeSequencesAndHeads) {
  const Tensor att = tensor(compute, {14, 18}), lse = tensor(master, {14, 3}), x = tensor(compute, {14, 54});
  EXPECT_EQ(of([&] { be.attention(att, lse, x, 4); }),
            "[attention] the number of rows of qkv is 14, expected a multiple of 4");
  EXPECT_EQ(of([&] { be.attention(att, lse, x, 0); }), "[attention] the context is 0, expected at least 1");
  EXPECT_EQ(of([&] {
              be.attention(att, tensor(master, {14, 4}), x, 7);
            }),
            "[attention] lse is (14, 4) f32, expected (14, H) with H a divisor of 18");
  EXPECT_EQ(of([&] {
              be.attention(att, lse, tensor(compute, {14, 55}), 7);
            }),
            "[attention] the width of qkv is 55, expected a multiple of 3");
  // 6 heads of 3 elements: no halves to rotate
  EXPECT_EQ(of([&] {
              be.qk_norm_rope(x, tensor(master, {14, 12}), tensor(master, {7, 3}), 1e-6);
            }),
            "[qk_norm_rope] head_dim is 3, expected even");
  EXPECT_EQ(of([&] {
              be.qk_norm_rope(x, tensor(master, {14, 5}), tensor(master, {7, 6}), 1e-6);
            }),
            "[qk_norm_rope] rstd is (14, 5) f32, expected (14, 2H) with H a divisor of 18");
}

TEST_F(Messages, ImpossibleValuesAreRefused) {
  const auto call = [&](const char* operation, const std::function<void(const Operands&)>& body) {
    for (const Case& c : cases())
      if (c.operation == std::string(operation)) return of([&] { body(right(c)); });
    return std::string("no such operation");
  };
  EXPECT_EQ(call("adamw", [&](const Operands& o) { be.adamw(o[0], o[1], o[2], o[3], o[4], control(o, 5), {}, 0); }),
            "[adamw] t is 0, expected at least 1");
  EXPECT_EQ(call("clip", [&](const Operands& o) { be.clip(control(o, 0), o[3], o[4], 0); }),
            "[clip] max_norm is 0, expected more than 0");
  EXPECT_EQ(call("clip", [&](const Operands& o) { be.clip(control(o, 0), o[3], o[4], NAN); }),
            "[clip] max_norm is nan, expected more than 0");
  EXPECT_EQ(call("cached_attention", [&](const Operands& o) { be.cached_attention(o[0], o[1], o[2], o[3], -1, 2); }),
            "[cached_attention] the position is -1, expected in [0, 3]: 17 rows of keys for 14 new ones");
  EXPECT_EQ(call("cached_attention", [&](const Operands& o) { be.cached_attention(o[0], o[1], o[2], o[3], 4, 2); }),
            "[cached_attention] the position is 4, expected in [0, 3]: 17 rows of keys for 14 new ones");
  EXPECT_EQ(call("cached_attention", [&](const Operands& o) { be.cached_attention(o[0], o[1], o[2], o[3], 3, 4); }),
            "[cached_attention] head_dim is 4, expected a divisor of 18");
  EXPECT_EQ(call("newton_schulz", [&](const Operands& o) { be.newton_schulz(o, -1, 1e-5); }),
            "[newton_schulz] steps is -1, expected at least 0");
  EXPECT_EQ(
      call("newton_schulz", [&](const Operands& o) { be.newton_schulz(o, 5, 1e-5, NewtonSchulzPrecision::tf32); }),
      "[newton_schulz] precision is tf32, expected fp32 on " + be.name());
  EXPECT_EQ(call("row_diameter", [&](const Operands& o) { be.row_diameter(o[0], o[1], o[2], 2, 2); }),
            "[row_diameter] share is 2, expected in [0, 2)");
  EXPECT_EQ(call("row_diameter", [&](const Operands& o) { be.row_diameter(o[0], o[1], o[2], 0, 0); }),
            "[row_diameter] shares is 0, expected at least 1");
}

TEST_F(Messages, Transport) {
  const Tensor x = tensor(f64, {3});
  EXPECT_EQ(of([&] { be.copy(tensor(f64, {4}), x); }), "[copy] to is (4) f64, expected (3)");
  EXPECT_EQ(of([&] { be.copy(tensor(i32, {3}), x); }), "[copy] to is (3) i32, expected a float dtype");
  EXPECT_EQ(of([&] { be.copy(x, tensor(i32, {3})); }), "[copy] to is (3) f64, expected i32");
  EXPECT_EQ(of([&] {
              be.copy(x, {nullptr, f64, {3}});
            }),
            "[copy] from is (3) f64 without memory, expected memory of its own");
  EXPECT_EQ(of([&] { be.fill(tensor(DType::u8, {3}), 0); }), "[fill] t is (3) u8, expected f64, f32, bf16 or i32");
  EXPECT_EQ(of([&] { be.read(x); }), "[read] scalar is (3) f64, expected 1 element");
  EXPECT_EQ(of([&] {
              be.upload({nullptr, f64, {3}}, nullptr);
            }),
            "[upload] to is (3) f64 without memory, expected memory of its own");
  EXPECT_EQ(of([&] {
              be.download(nullptr, {nullptr, f64, {3}});
            }),
            "[download] from is (3) f64 without memory, expected memory of its own");
  EXPECT_EQ(of([&] {
              be.start_upload({nullptr, f64, {3}}, nullptr);
            }),
            "[upload] to is (3) f64 without memory, expected memory of its own");
  EXPECT_EQ(of([&] {
              be.start_download(nullptr, {nullptr, f64, {3}});
            }),
            "[download] from is (3) f64 without memory, expected memory of its own");
}

}  // namespace
}  // namespace rownorm
