// Tensors of more than 2^32 elements, so that an index of 32 bits, signed or not, goes astray. Of each grid the first
// and the last blocks run (ROWNORM_STANDIN=ends=4) and memory that nobody touches is not there, so that this needs
// neither the memory nor the time of such tensors. What the operations make of the first and last rows is compared with
// the reference on these rows alone; a wrong address finds zeros, leaves NaNs, or ends the process.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string>
#include <vector>

#include "base/bf16.h"
#include "base/error.h"
#include "golden.h"
#include "ops/bench.h"

namespace rownorm {
namespace {

using Index = std::int64_t;

[[maybe_unused]] const int ends = setenv("ROWNORM_STANDIN", "ends=4,memory=4096", 1);  // before the module is opened

constexpr Index first_rows = 2, last_rows = 3;

// A tensor of `rows` rows on the device, and of its first and last rows on the reference.
class Pair {
 public:
  Pair(const std::string& backend, Index rows, const WorkspaceSizes& sizes = {})
      : large_(backend, sizes), small_("reference", {}), rows_(rows) {}
  Bench& large() { return large_; }
  Bench& small() { return small_; }
  Index rows() const { return rows_; }

  struct Tensors {
    Tensor large, small;
  };
  // Normals that bf16 holds exactly in the first and last rows; zeros elsewhere.
  Tensors input(DType dtype, Index columns, unsigned seed, double deviation = 1) {
    const Tensors t{large_.zeros(dtype, {rows_, columns}), {}};
    Values values = normals((first_rows + last_rows) * columns, seed, deviation);
    for (double& v : values) v = from_bf16(to_bf16(static_cast<float>(v)));
    const auto middle = values.begin() + first_rows * columns;
    put(t.large.rows(0, first_rows), {values.begin(), middle});
    put(t.large.rows(rows_ - last_rows, rows_), {middle, values.end()});
    return {t.large, small_.tensor(DType::f64, {first_rows + last_rows, columns}, values)};
  }
  // NaN in the first and last rows.
  Tensors output(DType dtype, Index columns) {
    const Tensors t{large_.zeros(dtype, {rows_, columns}), small_.zeros(DType::f64, {first_rows + last_rows, columns})};
    put(t.large.rows(0, first_rows), Values(static_cast<std::size_t>(first_rows * columns), NAN));
    put(t.large.rows(rows_ - last_rows, rows_), Values(static_cast<std::size_t>(last_rows * columns), NAN));
    return t;
  }

  // Roundings are at most a few of bf16, 2^-9 of the element or, where it is a sum that may cancel, of `terms`; an
  // element from elsewhere is as far off as it is large.
  void expect_equal(const Tensors& t, const char* what, double terms = 0) {
    Values found = get(t.large.rows(0, first_rows)), expected = small_.values(t.small);
    const Values last = get(t.large.rows(rows_ - last_rows, rows_));
    found.insert(found.end(), last.begin(), last.end());
    ASSERT_EQ(found.size(), expected.size());
    const Index columns = t.large.size() / rows_;
    for (Index row = 0; row < first_rows + last_rows; ++row) {
      const auto part = [&](const Values& v) {
        return Values(v.begin() + row * columns, v.begin() + (row + 1) * columns);
      };
      const Values right = part(expected), zeros(right.size());
      const double size = std::max(golden::relative_l2(right, zeros), terms);
      EXPECT_LE(golden::relative_l2(part(found), right) * golden::relative_l2(right, zeros), 0x1p-6 * size)
          << what << ", row " << row;
    }
  }

  // No kernels: their blocks in the middle do not run.
  void put(Tensor to, const Values& values) {
    if (to.dtype == DType::f64) return large_->upload(to, values.data());
    if (to.dtype == DType::f32) return large_->upload(to, std::vector<float>(values.begin(), values.end()).data());
    std::vector<std::uint16_t> bits;
    for (const double v : values) bits.push_back(to_bf16(static_cast<float>(v)));
    large_->upload(to, bits.data());
  }
  Values get(Tensor from) {
    const auto n = static_cast<std::size_t>(from.size());
    if (from.dtype == DType::f64) {
      Values values(n);
      large_->download(values.data(), from);
      return values;
    }
    if (from.dtype == DType::f32) {
      std::vector<float> values(n);
      large_->download(values.data(), from);
      return {values.begin(), values.end()};
    }
    std::vector<std::uint16_t> bits(n);
    large_->download(bits.data(), from);
    Values values;
    for (const std::uint16_t b : bits) values.push_back(from_bf16(b));
    return values;
  }

 private:
  Bench large_, small_;
  Index rows_;
};

// Rows whose elements pass 2^32 in the last few; 66000 elements can be read 16 bytes at a time, 66001 cannot.
constexpr Index many_rows = (1 << 16) + last_rows;
constexpr Index widths[] = {66000, 66001};

class Large : public ::testing::TestWithParam<std::string> {};
class LargeF32 : public Large {};  // what is f32 in every precision

TEST_P(Large, RmsNorm) {
  for (const Index d : widths) {
    Pair p(GetParam(), many_rows);
    const DType compute = p.large().compute(), master = p.large().master();
    const auto x = p.input(compute, d, 1), y = p.output(compute, d), rstd = p.output(master, 1);
    const auto dx = p.input(compute, d, 2);
    const auto dy = p.input(compute, d, 1);  // x, so that mean(dy y) is not small
    const auto row = [](const Pair::Tensors& t) {
      return std::pair{t.large.reshape({t.large.size()}), t.small.reshape({t.small.size()})};
    };
    p.large()->rmsnorm(y.large, row(rstd).first, x.large, 1e-6);
    p.small()->rmsnorm(y.small, row(rstd).second, x.small, 1e-6);
    p.large()->rmsnorm_backward(dx.large, dy.large, y.large, row(rstd).first);
    p.small()->rmsnorm_backward(dx.small, dy.small, y.small, row(rstd).second);
    p.expect_equal(y, "y");
    p.expect_equal(rstd, "rstd");
    p.expect_equal(dx, "dx");
  }
}

TEST_P(Large, Swiglu) {
  for (const Index F : widths) {
    Pair p(GetParam(), many_rows);
    const DType compute = p.large().compute();
    const auto gate_up = p.input(compute, 2 * F, 1), y = p.output(compute, F);
    const auto dy = p.input(compute, F, 2), dgate_up = p.output(compute, 2 * F);
    p.large()->swiglu(y.large, gate_up.large);
    p.small()->swiglu(y.small, gate_up.small);
    p.large()->swiglu_backward(dgate_up.large, dy.large, gate_up.large);
    p.small()->swiglu_backward(dgate_up.small, dy.small, gate_up.small);
    p.expect_equal(y, "y");
    p.expect_equal(dgate_up, "dgate_up");
  }
}

// Tokens and vocabulary both large; token ids of the first and last rows are those of the first and last weights.
TEST_P(Large, Embedding) {
  for (const Index d : widths) {
    Pair p(GetParam(), many_rows);
    Bench &large = p.large(), &small = p.small();
    const auto w = p.input(large.compute(), d, 1), y = p.output(large.compute(), d);
    const auto dw = p.input(large.master(), d, 2), dy = p.input(large.compute(), d, 3);
    std::vector<std::int32_t> ids(static_cast<std::size_t>(many_rows), 5);  // of a block of backward that does not run
    const std::vector<std::int32_t> ends_of_large{0, 1, many_rows - 1, many_rows - 3, many_rows - 2};
    std::copy_n(ends_of_large.begin(), first_rows, ids.begin());
    std::copy_n(ends_of_large.begin() + first_rows, last_rows, ids.end() - last_rows);
    const Tensor tokens = large.ids(ids), small_tokens = small.ids({0, 1, 4, 2, 3});
    large->embedding(y.large, tokens, w.large);
    small->embedding(y.small, small_tokens, w.small);
    large->embedding_backward(dw.large, tokens, dy.large);
    small->embedding_backward(dw.small, small_tokens, dy.small);
    p.expect_equal(y, "y");
    p.expect_equal(dw, "dw");
  }
}

// Each row is a sequence of its own, of one head.
TEST_P(Large, Attention) {
  for (const Index d : {16, 6}) {
    const Index rows = (Index{1} << 32) / (3 * d) + 9;
    Pair p(GetParam(), rows, {.tokens = rows, .heads = 1});
    Bench &large = p.large(), &small = p.small();
    const auto qkv = p.input(large.compute(), 3 * d, 1), dqkv = p.output(large.compute(), 3 * d);
    const auto att = p.output(large.compute(), d), datt = p.input(large.compute(), d, 2);
    const auto lse = p.output(large.master(), 1), rstd = p.output(large.master(), 2);
    const Values angles = normals(d, 3);
    const Tensor rope = large.zeros(large.master(), {1, d}), exact = small.zeros(DType::f64, {1, d});
    p.put(rope, angles);
    small->upload(exact, angles.data());
    large->qk_norm_rope(qkv.large, rstd.large, rope, 1e-6);
    small->qk_norm_rope(qkv.small, rstd.small, exact, 1e-6);
    large->attention(att.large, lse.large, qkv.large, 1);
    small->attention(att.small, lse.small, qkv.small, 1);
    large->attention_backward(dqkv.large, datt.large, att.large, lse.large, qkv.large, 1);
    small->attention_backward(dqkv.small, datt.small, att.small, lse.small, qkv.small, 1);
    large->qk_norm_rope_backward(dqkv.large, qkv.large, rstd.large, rope);
    small->qk_norm_rope_backward(dqkv.small, qkv.small, rstd.small, exact);
    p.expect_equal(qkv, "qkv");
    p.expect_equal(rstd, "rstd");
    p.expect_equal(lse, "lse", 1);
    p.expect_equal(att, "att");
    p.expect_equal(dqkv, "dqkv");
  }
}

TEST_P(LargeF32, Rows) {
  for (const Index d : widths) {
    Pair p(GetParam(), many_rows);
    Bench &large = p.large(), &small = p.small();
    const auto x = p.input(DType::f32, d, 1), norms = p.output(DType::f64, 1);
    const Values values = normals(d, 2);
    const Tensor row = large.zeros(DType::f64, {d}), exact = small.tensor(DType::f64, {d}, values);
    p.put(row, values);
    large->subtract_row(x.large, row, 0.5);
    small->subtract_row(x.small, exact, 0.5);
    large->row_norms(norms.large.reshape({many_rows}), x.large);
    small->row_norms(norms.small.reshape({first_rows + last_rows}), x.small);
    p.expect_equal(norms, "norms");
    large->row_normalize(x.large, 1e-8);
    small->row_normalize(x.small, 1e-8);
    p.expect_equal(x, "x");
  }
}

TEST_P(LargeF32, ColumnSum) {
  const Index d = 1 << 20, rows = 4100, last = 32;  // columns of the last block
  Pair p(GetParam(), rows);
  const auto x = p.input(DType::f32, d, 1);
  const Tensor sum = p.large().zeros(DType::f64, {d}), exact = p.small().zeros(DType::f64, {d});
  p.large()->column_sum(sum, x.large);
  p.small()->column_sum(exact, x.small);
  const Values right = p.small().values(exact);
  EXPECT_LE(golden::relative_l2(p.get(sum.rows(d - last, d)), Values(right.end() - last, right.end())), 1e-12);
}

// Elements, one at a time where a tensor does not begin at 16 bytes.
TEST_P(LargeF32, Elements) {
  // Rows of one element; the last round of a loop over 4096 (or 1024) blocks, 256 threads and 8 elements is whole.
  constexpr Index size = (Index{1} << 32) + (Index{1} << 24);
  for (const Index offset : {0, 1}) {
    Pair p(GetParam(), size);
    Bench &large = p.large(), &small = p.small();
    const DType master = large.master();
    Values squares;
    const auto grad = p.input(master, 1, 1), buffer = p.input(master, 1, 2), exp_avg = p.input(master, 1, 3);
    const auto w = p.input(master, 1, 4), out = p.input(master, 1, 5), step = p.input(master, 1, 6);
    const auto half = p.input(DType::bf16, 1, 7), wide = p.input(DType::f64, 1, 8), exp_avg_sq = p.output(master, 1);
    for (Bench* bench : {&large, &small}) {
      Bench& be = *bench;
      const auto of = [&](const Pair::Tensors& t) {
        return &be == &large ? t.large.rows(offset, size) : t.small.rows(offset, first_rows + last_rows);
      };
      const UpdateControl control = be.control();
      const Tensor lr = be.scalar(0.02);
      be->fill(of(exp_avg_sq), 0.75);
      be->momentum(of(out), of(buffer), of(grad), control, {0.95, 1, 0.95, 1});
      be->adamw(of(step), of(exp_avg), of(exp_avg_sq), of(grad), lr, control, {0.9, 0.999, 1e-10}, 3);
      be->apply_step(of(w), of(step), lr, 0.1, control);
      be->copy(of(wide), of(w));
      be->copy(of(half), of(w));
      be->scale(of(w), lr, -3);
      const Tensor sum = be.scalar(0);  // to which blocks that do not run add the zeros of the workspace
      be->squared_norm(sum, of(grad));
      squares.push_back(be->read(sum));
    }
    EXPECT_NEAR(squares[0], squares[1], 1e-12);
    for (const auto& [t, name] : {std::pair{&buffer, "buffer"},
                                  {&out, "out"},
                                  {&exp_avg, "exp_avg"},
                                  {&step, "step"},
                                  {&wide, "wide"},
                                  {&half, "half"},
                                  {&w, "w"}})
      p.expect_equal(*t, name);
  }
}

TEST_P(LargeF32, MoreBlocksThanAGridMayHave) {
  Bench be(GetParam(), {});
  std::uint32_t memory = 0;  // never touched
  try {
    be->swiglu({&memory, be.compute(), {Index{1} << 31, 1}}, {&memory, be.compute(), {Index{1} << 31, 2}});
    FAIL() << "a grid of 2^31 blocks was launched";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Exit::device);
    EXPECT_STREQ(
        error.what(),
        "[cuda] a grid of 2147483648 blocks, at most 2147483647 are possible: a smaller micro-batch is needed");
  }
}

const auto backend_name = [](const auto& backend) { return backend.param; };
INSTANTIATE_TEST_SUITE_P(Backends, Large, ::testing::Values("cuda_fp32", "cuda_bf16"), backend_name);
INSTANTIATE_TEST_SUITE_P(Backends, LargeF32, ::testing::Values("cuda_fp32"), backend_name);

}  // namespace
}  // namespace rownorm
