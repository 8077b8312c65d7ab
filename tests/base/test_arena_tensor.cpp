#include <gtest/gtest.h>

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "base/arena.h"
#include "base/expect_error.h"
#include "base/tensor.h"

namespace rownorm {
namespace {

TEST(Shape, HoldsUpToFourDimensions) {
  EXPECT_EQ(Shape().rank(), 0);
  EXPECT_EQ(Shape().size(), 1);
  EXPECT_EQ(Shape({3, 5, 7, 11}).size(), 1155);
  EXPECT_EQ(Shape({3, 0, 7}).size(), 0);
  EXPECT_EQ(Shape({3, 5}).str(), "(3, 5)");
  EXPECT_EQ(Shape({3, 5}), Shape({3, 5}));
  EXPECT_NE(Shape({3, 5}), Shape({5, 3}));
  EXPECT_NE(Shape({3}), Shape({3, 1}));
  EXPECT_THROW(Shape({1, 2, 3, 4, 5}), std::logic_error);
  EXPECT_THROW(Shape({1, -1}), std::logic_error);
}

TEST(Tensor, KnowsItsSize) {
  EXPECT_EQ((Tensor{nullptr, DType::f64, {3, 5}}.bytes()), 120);
  EXPECT_EQ((Tensor{nullptr, DType::f32, {3, 5}}.bytes()), 60);
  EXPECT_EQ((Tensor{nullptr, DType::i32, {3, 5}}.bytes()), 60);
  EXPECT_EQ((Tensor{nullptr, DType::bf16, {3, 5}}.bytes()), 30);
  EXPECT_EQ((Tensor{nullptr, DType::u8, {3, 5}}.bytes()), 15);
  EXPECT_EQ((Tensor{nullptr, DType::bf16, {3, 5}}.str()), "(3, 5) bf16");
}

TEST(Tensor, IsReadOnlyAsWhatItIs) {
  std::vector<float> values(15);
  const Tensor t{values.data(), DType::f32, {3, 5}};
  EXPECT_EQ(t.as<float>(), values.data());
  EXPECT_THROW(t.as<double>(), std::logic_error);
  EXPECT_THROW(t.as<std::int32_t>(), std::logic_error);
  EXPECT_THROW(t.as<std::uint8_t>(), std::logic_error);
}

TEST(Tensor, RowsAreAView) {
  std::vector<double> values(3 * 5 * 7);
  const Tensor t{values.data(), DType::f64, {3, 5, 7}};
  const Tensor middle = t.rows(1, 3);
  EXPECT_EQ(middle.shape, Shape({2, 5, 7}));
  EXPECT_EQ(middle.as<double>(), values.data() + 35);
  EXPECT_EQ(t.rows(3, 3).size(), 0);
  EXPECT_EQ(t.reshape({105}).rows(104, 105).as<double>(), values.data() + 104);
  EXPECT_EQ(t.reshape({3, 5, 7, 1}).rows(2, 3).shape, Shape({1, 5, 7, 1}));
  EXPECT_EQ((Tensor{values.data(), DType::f64, {0, 5}}.rows(0, 0).shape), Shape({0, 5}));
  EXPECT_THROW(t.rows(-1, 2), std::logic_error);
  EXPECT_THROW(t.rows(2, 1), std::logic_error);
  EXPECT_THROW(t.rows(2, 4), std::logic_error);
  EXPECT_THROW((Tensor{values.data(), DType::f64, {}}.rows(0, 1)), std::logic_error);
}

TEST(Tensor, RowsOfAMeasuredTensorHaveNoMemory) {
  EXPECT_EQ((Tensor{nullptr, DType::f32, {3, 5}}.rows(1, 2).data), nullptr);
}

TEST(Tensor, ReshapeKeepsTheElements) {
  std::vector<float> values(15);
  const Tensor t{values.data(), DType::f32, {3, 5}};
  EXPECT_EQ(t.reshape({5, 3}).shape, Shape({5, 3}));
  EXPECT_EQ(t.reshape({15}).data, t.data);
  EXPECT_THROW(t.reshape({4, 4}), std::logic_error);
}

// The same plan over any arena.
std::vector<Tensor> plan(Arena& arena) {
  return {arena.add("weights", DType::f32, {3, 5}), arena.add("state", DType::f64, {33}),
          arena.add("weights", DType::bf16, {1, 1}), arena.add("weights", DType::u8, {0, 7}),
          arena.add("ids", DType::i32, {257})};
}

TEST(Arena, MeasuresWhatItThenHolds) {
  Arena measure;
  for (const Tensor& t : plan(measure)) EXPECT_EQ(t.data, nullptr);
  EXPECT_EQ(measure.bytes(), 256 + 512 + 256 + 0 + 1280);

  std::vector<char> memory(static_cast<std::size_t>(measure.bytes()));
  Arena arena(memory.data(), measure.bytes());
  const std::vector<Tensor> tensors = plan(arena);
  EXPECT_EQ(arena.bytes(), measure.bytes());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::ptrdiff_t offset = static_cast<char*>(tensors[i].data) - memory.data();
    EXPECT_EQ(offset % Arena::alignment, 0);
    const std::ptrdiff_t next =
        i + 1 < tensors.size() ? static_cast<char*>(tensors[i + 1].data) - memory.data() : measure.bytes();
    EXPECT_LE(offset + tensors[i].bytes(), next);  // no overlap
  }
  EXPECT_EQ(tensors[1].shape, Shape({33}));
  EXPECT_EQ(tensors[1].dtype, DType::f64);
  EXPECT_THROW(arena.add("more", DType::u8, {1}), std::logic_error);
}

TEST(Arena, AddsUpByPurpose) {
  Arena arena;
  plan(arena);
  const std::vector<std::pair<std::string, std::int64_t>> expected{{"weights", 512}, {"state", 512}, {"ids", 1280}};
  EXPECT_EQ(arena.by_purpose(), expected);
  EXPECT_EQ(describe(arena), "weights 512 B, state 512 B, ids 1.2 KiB, total 2.2 KiB");
}

TEST(Arena, APlanBeyond63BitsIsAnError) {
  Arena arena;
  const std::int64_t big = std::int64_t{1} << 31;
  expect_error(Exit::device, "[memory] weights: a tensor (2147483648, 2147483648, 2) f64 exceeds 2^63 bytes", [&] {
    arena.add("weights", DType::f64, {big, big, 2});
  });
  expect_error(Exit::device, "[memory] weights: the plan exceeds 2^63 bytes", [&] {
    for (int i = 0; i < 2; ++i) arena.add("weights", DType::u8, {big, big});
  });
  expect_error(Exit::device, "the plan exceeds 2^63 bytes", [] { Arena().add("weights", DType::u8, {INT64_MAX}); });
  EXPECT_EQ(arena.bytes(), big * big);  // what failed is not counted
}

TEST(Arena, BytesForPeople) {
  EXPECT_EQ(human_bytes(0), "0 B");
  EXPECT_EQ(human_bytes(1023), "1023 B");
  EXPECT_EQ(human_bytes(1024), "1.0 KiB");
  EXPECT_EQ(human_bytes(12'897'485), "12.3 MiB");
  EXPECT_EQ(human_bytes(std::int64_t{141} << 30), "141.0 GiB");
  EXPECT_EQ(human_bytes(INT64_MAX), "8.0 EiB");
}

}  // namespace
}  // namespace rownorm
