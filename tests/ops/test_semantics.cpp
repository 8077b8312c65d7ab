// What the contract in ops/backend.h says about the edges: updates that must not happen, zero and non-finite rows, no
// rows, ties, shares, conversions, memory. The same on every backend.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/arena.h"
#include "base/error.h"
#include "ops/bench.h"

namespace rownorm {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();

class Semantics : public EveryBackend {
 protected:
  Bench be{GetParam()};

  Tensor master(Shape shape, const Values& values) { return be.tensor(be.master(), shape, values); }
  Tensor compute(Shape shape, const Values& values) { return be.tensor(be.compute(), shape, values); }

  struct Diameter {
    double distance;
    std::vector<std::int32_t> pair;
  };
  Diameter diameter(Tensor s, std::int64_t share = 0, std::int64_t shares = 1) {
    const Tensor distance = be.scalar(-1), pair = be.ids({-1, -1});
    be->row_diameter(distance, pair, s, share, shares);
    return {be->read(distance), be.integers(pair)};
  }
};

using Pair = std::vector<std::int32_t>;

// ---- memory and transport ----

TEST_P(Semantics, MemoryIsZeroedAndAligned) {
  const Memory memory = be->allocate(1000);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory.get()) % Arena::alignment, 0U);
  std::vector<unsigned char> bytes(1000, 1);
  be->download(bytes.data(), {memory.get(), DType::u8, {1000}});
  EXPECT_EQ(bytes, std::vector<unsigned char>(1000, 0));
}

TEST_P(Semantics, MemoryThatCannotBeHadIsAnErrorWithTheFigure) {
  try {
    be->allocate(std::int64_t{1} << 60);
    FAIL() << "an exbibyte was granted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Exit::device);
    EXPECT_NE(std::string(error.what()).find("1.0 EiB"), std::string::npos) << error.what();
  }
}

TEST_P(Semantics, CopyRoundsToNearestEven) {
  // bf16 has 8 significant bits: 1 + 2^-8 and 1 + 3 2^-8 lie half way; the third is just above half way
  const Values values{1 + 0x1p-8, 1 + 0x3p-8, 1 + 0x1p-8 + 0x1p-20, -0x1p-130, infinity, -infinity, 3.4e38};
  const Values bf16{1, 1 + 0x1p-6, 1 + 0x1p-7, -0x1p-130, infinity, -infinity, infinity};
  EXPECT_EQ(be.values(be.tensor(DType::bf16, {7}, values)), bf16);
  EXPECT_EQ(be.values(be.tensor(DType::f32, {2}, {1 + 0x1p-24, 1 + 0x3p-24})), (Values{1, 1 + 0x1p-22}));
  EXPECT_TRUE(std::isnan(be.values(be.tensor(DType::bf16, {1}, {nan}))[0]));

  const Tensor narrow = be.tensor(DType::f32, {7}, values), half = be.zeros(DType::bf16, {7});
  be->copy(half, narrow);
  EXPECT_EQ(be.values(half), bf16);
  be->copy(narrow, half);
  EXPECT_EQ(be.values(narrow), bf16);

  const Tensor ids = be.ids({1, -7}), other = be.ids({0, 0});
  be->copy(other, ids);
  EXPECT_EQ(be.integers(other), (Pair{1, -7}));
}

TEST_P(Semantics, FillAndReadEveryDtype) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::i32}) {
    const Tensor t = be.zeros(dtype, {3});
    be->fill(t, -3);
    EXPECT_EQ(be->read(t.rows(2, 3)), -3) << name_of(dtype);
  }
  const Tensor byte = be.zeros(DType::u8, {1});
  const std::uint8_t value = 200;
  be->upload(byte, &value);
  EXPECT_EQ(be->read(byte), 200);
}

TEST_P(Semantics, TransfersThatAreWaitedFor) {
  const Memory host = be->allocate_host(3 * 4);
  auto* ids = static_cast<std::int32_t*>(host.get());
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(ids) % Arena::alignment, 0U);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(ids[i], 0);
  ids[1] = -5;
  const Tensor t = be.ids({1, 2, 3});
  const auto there = be->start_upload(t, ids);
  be->wait(there);
  ids[1] = 8;
  EXPECT_EQ(be.integers(t), (std::vector<std::int32_t>{0, -5, 0}));
  be->fill(t, 4);
  const auto back = be->start_download(ids, t);
  be->fill(t, 5);
  be->wait(back);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(ids[i], 4);
  EXPECT_EQ(be.integers(t), (std::vector<std::int32_t>{5, 5, 5}));
  EXPECT_NE(be->allocate_host(0), nullptr);
}

// ---- the update ----

TEST_P(Semantics, ClipSaysWhetherTheUpdateGoesAhead) {
  struct {
    double squares, loss, max_norm, norm, clip;
    int ok;
  } const cases[] = {
      {4, 1, 1, 2, 1 / (2 + 1e-6), 1},
      {4, 1, 3, 2, 1, 1},
      {4, 1, infinity, 2, 1, 1},
      {0, 1, 1, 0, 1, 1},
      {nan, 1, 1, nan, 0, 0},
      {infinity, 1, 1, infinity, 0, 0},
      {4, nan, 1, 2, 0, 0},
      {4, infinity, 1, 2, 0, 0},
      {4, -infinity, 1, 2, 0, 0},
      {nan, 1, infinity, nan, 0, 0},
  };
  for (const auto& c : cases) {
    const UpdateControl control{be.scalar(-1), be.scalar(-1), be.ids({1})};
    be->clip(control, be.scalar(c.squares), be.scalar(c.loss), c.max_norm);
    if (std::isnan(c.norm))
      EXPECT_TRUE(std::isnan(be->read(control.norm)));
    else
      EXPECT_EQ(be->read(control.norm), c.norm);
    EXPECT_EQ(be->read(control.clip), c.clip);
    EXPECT_EQ(be->read(control.ok), c.ok);
  }
}

TEST_P(Semantics, OnceNotOkAlwaysNotOk) {
  const UpdateControl control = be.control();
  for (const double squares : {4.0, nan, 4.0}) be->clip(control, be.scalar(squares), be.scalar(1), 1);
  EXPECT_EQ(be->read(control.ok), 0);
  EXPECT_EQ(be->read(control.clip), 0);
  EXPECT_EQ(be->read(control.norm), 2);
}

TEST_P(Semantics, SquaredNormAddsAndIsAddedInDouble) {
  // 1e4 ones lost one by one in f32 beside 2^24
  Values x(10001, 1);
  x[0] = 0x1p12;
  const Tensor sum = be.scalar(0.5);
  be->squared_norm(sum, master({10001}, x));
  EXPECT_EQ(be->read(sum), 0x1p24 + 10000.5);
  be->squared_norm(sum, master({2}, {1, nan}));
  EXPECT_TRUE(std::isnan(be->read(sum)));
}

TEST_P(Semantics, NothingChangesWhenTheUpdateIsNotOk) {
  const Values before{1, -2, 3}, bad{nan, infinity, 1};
  const Tensor grad = master({3}, bad), lr = be.scalar(nan);
  const UpdateControl control = be.control(false);

  const Tensor out = master({3}, bad), buffer = master({3}, before);
  be->momentum(out, buffer, grad, control, {0.95, 1, 0.95, 1});
  EXPECT_EQ(be.values(buffer), before);
  EXPECT_EQ(be.values(out), Values(3, 0.0));

  const Tensor step = master({3}, bad), exp_avg = master({3}, before), exp_avg_sq = master({3}, before);
  be->adamw(step, exp_avg, exp_avg_sq, grad, lr, control, {0.9, 0.999, 1e-10}, 1);
  EXPECT_EQ(be.values(exp_avg), before);
  EXPECT_EQ(be.values(exp_avg_sq), before);
  EXPECT_EQ(be.values(step), Values(3, 0.0));

  const Tensor w = master({3}, before);
  be->apply_step(w, grad, lr, 0.1, control);
  EXPECT_EQ(be.values(w), before);
}

TEST_P(Semantics, UpdatesUseTheClipCoefficient) {
  UpdateControl control = be.control();
  be->fill(control.clip, 0.25);
  const Tensor grad = master({2}, {4, -8}), lr = be.scalar(0.5);  // clipped: 1, -2
  const Tensor out = master({2}, {nan, nan}), buffer = master({2}, {2, 16});
  be->momentum(out, buffer, grad, control, {0.5, 2, 4, 1});
  EXPECT_EQ(be.values(buffer), (Values{3, 4}));
  EXPECT_EQ(be.values(out), (Values{13, 14}));

  const Tensor step = be.zeros(be.master(), {2}), exp_avg = master({2}, {8, 8}), exp_avg_sq = master({2}, {8, 8});
  be->adamw(step, exp_avg, exp_avg_sq, grad, lr, control, {0.5, 0.75, 0}, 1);
  EXPECT_EQ(be.values(exp_avg), (Values{4.5, 3}));
  EXPECT_EQ(be.values(exp_avg_sq), (Values{6.25, 7}));
  EXPECT_NEAR(be.values(step)[0], -0.5 * 9 / 5, 4 * 0x1p-24);  // -lr (4.5 / 0.5) / sqrt(6.25 / 0.25), in f32

  const Tensor w = master({2}, {2, 4});
  be->apply_step(w, master({2}, {1, 2}), lr, 0.5, control);  // (1 - 0.25) w + step
  EXPECT_EQ(be.values(w), (Values{2.5, 5}));
}

TEST_P(Semantics, NewtonSchulzOfZeroIsZero) {
  for (const double eps : {1e-5, 0.0}) {
    const Tensor x = be.zeros(be.master(), {5, 3});
    be->newton_schulz({{x}}, 5, eps);
    EXPECT_EQ(be.values(x), Values(15, 0.0));
  }
}

TEST_P(Semantics, NewtonSchulzOfATransposeIsTheTranspose) {
  const Values wide = normals(3 * 5, 1);
  Values tall;
  for (std::size_t j = 0; j < 5; ++j)
    for (std::size_t i = 0; i < 3; ++i) tall.push_back(wide[i * 5 + j]);
  const Tensor x = master({3, 5}, wide), y = master({5, 3}, tall);
  be->newton_schulz({{x}}, 5, 1e-5);
  be->newton_schulz({{y}}, 5, 1e-5);
  const Values a = be.values(x), b = be.values(y);
  for (std::size_t i = 0; i < 3; ++i)
    for (std::size_t j = 0; j < 5; ++j) EXPECT_NEAR(a[i * 5 + j], b[j * 3 + i], 1e-5);  // rounding, grown five times
}

TEST_P(Semantics, NewtonSchulzWithoutStepsDividesByTheNorm) {
  const Tensor x = master({2, 1}, {3, 4});
  be->newton_schulz({{x}}, 0, 5);  // ||x||_F + eps = 10
  EXPECT_NEAR(be.values(x)[0], 0.3, 0x1p-24);
  EXPECT_NEAR(be.values(x)[1], 0.4, 0x1p-24);
  be->newton_schulz({}, 5, 1e-5);  // no matrices: nothing
}

TEST_P(Semantics, RowNormalize) {
  for (const double eps : {1e-8, 0.0}) {
    // a zero row; one whose squares are below f32's range; one with a NaN
    const Tensor x = master({4, 2}, {3, 4, 0, 0, 3e-30, 4e-30, nan, 1});
    be->row_normalize(x, eps);
    const Values y = be.values(x);
    EXPECT_NEAR(y[0], 3 / (5 + eps), 0x1p-23);
    EXPECT_NEAR(y[1], 4 / (5 + eps), 0x1p-23);
    EXPECT_EQ(y[2], 0);
    EXPECT_EQ(y[3], 0);
    EXPECT_NEAR(y[5] * (5e-30 + eps) / 4e-30, 1, 0x1p-22);
    EXPECT_TRUE(std::isnan(y[6]) && std::isnan(y[7]));
  }
}

TEST_P(Semantics, ProjectionCentresRows) {
  const std::int64_t V = 7, d = 3;
  const Values values = normals(V * d, 1);
  const Tensor x = master({V, d}, values), sum = be.tensor(DType::f64, {d}, {nan, nan, nan});
  be->column_sum(sum, x);
  be->subtract_row(x, sum, 1.0 / static_cast<double>(V));
  const Values centred = be.values(x), sums = be.values(sum);
  for (std::size_t j = 0; j < 3; ++j) {
    double before = 0, after = 0;
    for (std::size_t i = 0; i < 7; ++i) {
      before += values[i * 3 + j];
      after += centred[i * 3 + j];
      EXPECT_NEAR(centred[i * 3 + j], values[i * 3 + j] - sums[j] / 7, 4 * 0x1p-24);  // |values| < 4
    }
    EXPECT_NEAR(sums[j], before, 7 * 4 * 0x1p-24);
    EXPECT_NEAR(after, 0, 7 * 4 * 0x1p-24);
  }
}

TEST_P(Semantics, ColumnSumIsAddedInDouble) {
  const Tensor sum = be.zeros(DType::f64, {1});
  be->column_sum(sum, master({3, 1}, {0x1p30, 1, -0x1p30}));
  EXPECT_EQ(be->read(sum), 1);
}

TEST_P(Semantics, Scale) {
  const Tensor x = master({3}, {1, -2, 0});
  be->scale(x, be.scalar(0.5), -3);
  EXPECT_EQ(be.values(x), (Values{-1.5, 3, 0}));
}

// ---- measurements ----

TEST_P(Semantics, DiameterOfTiesIsTheSmallestPair) {
  // a square of side 2 (rows 1, 2, 4, 5; diagonals 1-4 and 2-5) around two points of its middle
  const Tensor s = master({6, 2}, {0, 0, 1, 1, 1, -1, 0, 0, -1, -1, -1, 1});
  const Diameter whole = diameter(s);
  EXPECT_EQ(whole.distance, std::sqrt(8));
  EXPECT_EQ(whole.pair, (Pair{1, 4}));
}

TEST_P(Semantics, DiameterOfEqualRowsIsZeroWithoutAPair) {
  for (const std::int64_t rows : {0, 1, 5}) {
    const Diameter d = diameter(master({rows, 2}, Values(static_cast<std::size_t>(2 * rows), 0.7)));
    EXPECT_EQ(d.distance, 0);
    EXPECT_EQ(d.pair, (Pair{0, 0}));
  }
}

TEST_P(Semantics, DiameterIsTheMaximumOverShares) {
  const std::int64_t V = 37, d = 5;
  Values values = normals(V * d, 1);
  for (std::size_t i = 20; i < 25; ++i) values[i] = values[i - 15];  // row 4 equals row 1
  for (std::size_t j = 0; j < 5; ++j) values[4 * 5 + j] *= 9;        // the farthest row, twice
  for (std::size_t j = 0; j < 5; ++j) values[5 + j] *= 9;
  const Tensor s = master({V, d}, values);
  const Diameter whole = diameter(s);
  EXPECT_TRUE(whole.pair[0] == 1 || whole.pair[1] == 1);  // and not 4
  for (const std::int64_t shares : {2, 3, 64}) {
    Diameter best{0, {0, 0}};
    for (std::int64_t share = 0; share < shares; ++share) {
      const Diameter part = diameter(s, share, shares);
      if (part.distance > best.distance || (part.distance == best.distance && part.pair < best.pair)) best = part;
    }
    EXPECT_EQ(best.distance, whole.distance) << shares;
    EXPECT_EQ(best.pair, whole.pair) << shares;
  }
}

TEST_P(Semantics, DiameterWithANonFiniteRowIsNotANumber) {
  for (const double bad : {nan, infinity, -infinity}) {
    Values values = normals(9 * 3, 1);
    values[7 * 3 + 1] = values[8 * 3] = bad;
    for (std::int64_t share = 0; share < 12; ++share) {
      const Diameter d = diameter(master({9, 3}, values), share, 12);
      EXPECT_TRUE(std::isnan(d.distance));
      EXPECT_EQ(d.pair, (Pair{7, 7}));
    }
  }
}

TEST_P(Semantics, DiameterSurvivesACommonOffset) {
  // differences of 1e-4 on an offset of 2^10: squares of whole rows in f32 would drown them
  const Tensor s = master({4, 2}, {1024, 1024, 1024 + 0x1p-13, 1024, 1024, 1024 + 0x3p-13, 1024 - 0x1p-13, 1024});
  const Diameter d = diameter(s);
  EXPECT_EQ(d.distance, std::sqrt(10) * 0x1p-13);
  EXPECT_EQ(d.pair, (Pair{1, 2}));
}

TEST_P(Semantics, RowNorms) {
  const Tensor norms = be.zeros(DType::f64, {3});
  be->row_norms(norms, master({3, 2}, {3, 4, 0, 0, nan, 1}));
  const Values values = be.values(norms);
  EXPECT_EQ(values[0], 5);
  EXPECT_EQ(values[1], 0);
  EXPECT_TRUE(std::isnan(values[2]));
}

TEST_P(Semantics, RowRange) {
  const Tensor h = compute({2, 2}, {1, 0, 1, -1}), s = master({3, 2}, {1, 2, -3, 4, 2, 2});
  const Tensor lowest = master({2}, {nan, nan}), highest = master({2}, {nan, nan});
  be->row_range(lowest, highest, h, s);
  EXPECT_EQ(be.values(lowest), (Values{-3, -7}));
  EXPECT_EQ(be.values(highest), (Values{2, 0}));

  for (std::size_t bad = 0; bad < 3; ++bad) {  // whichever row it is, and only for the position that meets it
    Values values{1, 2, -3, 4, 2, 2};
    values[2 * bad + 1] = infinity;  // times 0 for the first position
    be->row_range(lowest, highest, h, master({3, 2}, values));
    EXPECT_TRUE(std::isnan(be.values(lowest)[0]) && std::isnan(be.values(highest)[0])) << bad;
    EXPECT_EQ(be.values(lowest)[1], -infinity) << bad;
  }
}

// ---- no rows ----

TEST_P(Semantics, NoTokens) {
  const std::int64_t V = 5, d = 6, H = 1;
  const Tensor w = compute({V, d}, normals(V * d, 1)), none = be.zeros(be.compute(), {0, d});
  const Tensor wide = be.zeros(be.compute(), {0, 3 * d}), tokens = be.ids({}), rstd = be.zeros(be.master(), {0});
  const Values ones(static_cast<std::size_t>(V * d), 1);
  const Tensor dw = master({V, d}, ones), loss = be.scalar(2);
  be->embedding(none, tokens, w);
  be->embedding_backward(dw, tokens, none);
  be->rmsnorm(none, rstd, none, 1e-6);
  be->rmsnorm_backward(none, none, none, rstd);
  be->linear(be.zeros(be.compute(), {0, V}), none, w);
  be->linear_input_grad(none, be.zeros(be.compute(), {0, V}), w);
  be->linear_weight_grad(dw, be.zeros(be.compute(), {0, V}), none);
  be->qk_norm_rope(wide, be.zeros(be.master(), {0, 2 * H}), be.zeros(be.master(), {3, d}), 1e-6);
  be->qk_norm_rope_backward(wide, wide, be.zeros(be.master(), {0, 2 * H}), be.zeros(be.master(), {3, d}));
  be->attention(none, be.zeros(be.master(), {0, H}), wide, 3);
  be->attention_backward(wide, none, none, be.zeros(be.master(), {0, H}), wide, 3);
  const Tensor keys = compute({3, d}, normals(3 * d, 2));
  const Values before = be.values(keys);
  be->cached_attention(none, keys, keys, wide, 3, d);
  EXPECT_EQ(be.values(keys), before);
  be->swiglu(none, be.zeros(be.compute(), {0, 2 * d}));
  be->swiglu_backward(be.zeros(be.compute(), {0, 2 * d}), none, be.zeros(be.compute(), {0, 2 * d}));
  be->head_loss(loss, none, dw, none, w, tokens, 1);
  be->head_loss(loss, none, w, tokens, 1);
  EXPECT_EQ(be.values(dw), ones);
  EXPECT_EQ(be->read(loss), 2);
}

TEST_P(Semantics, NoRowsOfTheVocabulary) {
  const std::int64_t d = 6, P = 2;
  const Tensor none = be.zeros(be.master(), {0, d}), lr = be.scalar(1), sum = be.scalar(3);
  const Tensor columns = be.tensor(DType::f64, {d}, Values(6, nan));
  const UpdateControl control = be.control();
  be->squared_norm(sum, none);
  EXPECT_EQ(be->read(sum), 3);
  be->momentum(none, none, none, control, {0.95, 1, 0.95, 1});
  be->adamw(none, none, none, none, lr, control, {0.9, 0.999, 1e-10}, 1);
  be->newton_schulz({{none}}, 5, 1e-5);
  be->row_normalize(none, 1e-8);
  be->scale(none, lr, 2);
  be->column_sum(columns, none);
  EXPECT_EQ(be.values(columns), Values(6, 0.0));
  be->subtract_row(none, columns, 1);
  be->apply_step(none, none, lr, 0.1, control);
  be->row_norms(be.zeros(DType::f64, {0}), none);
  const Tensor lowest = be.zeros(be.master(), {P}), highest = be.zeros(be.master(), {P});
  be->row_range(lowest, highest, compute({P, d}, normals(P * d, 1)), none);
  EXPECT_EQ(be.values(lowest), Values(2, infinity));
  EXPECT_EQ(be.values(highest), Values(2, -infinity));
}

TEST_P(Semantics, NonFiniteActivationsReachTheLoss) {
  for (const double bad : {nan, infinity}) {
    const Tensor h = compute({2, 3}, {1, 2, 3, 1, bad, 3}), w = compute({4, 3}, normals(12, 1));
    const Tensor loss = be.scalar(0);
    be->head_loss(loss, h, w, be.ids({0, 3}), 0.5);
    EXPECT_FALSE(std::isfinite(be->read(loss))) << bad;
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, Semantics, ::testing::Values(ROWNORM_TEST_BACKENDS),
                         [](const auto& backend) { return backend.param; });

}  // namespace
}  // namespace rownorm
