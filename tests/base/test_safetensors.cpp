#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/allocations.h"
#include "base/expect_error.h"
#include "base/safetensors.h"
#include "base/temporary_folder.h"
#include "golden.h"

namespace rownorm {
namespace {

std::string le(std::uint64_t value) { return {reinterpret_cast<const char*>(&value), sizeof value}; }

std::string file_of(const std::string& header, const std::string& data = "") {
  return le(header.size()) + header + data;
}

// A reader over a copy of exactly the given bytes, so that a sanitizer sees a read past either end.
struct InMemory {
  std::vector<std::byte> bytes;
  SafetensorsFile file;

  explicit InMemory(const std::string& text)
      : bytes(reinterpret_cast<const std::byte*>(text.data()),
              reinterpret_cast<const std::byte*>(text.data()) + text.size()),
        file(bytes, "m.safetensors") {}
  const SafetensorsFile* operator->() const { return &file; }
};

template <class T>
std::string raw(std::initializer_list<T> values) {
  return {reinterpret_cast<const char*>(values.begin()), values.size() * sizeof(T)};
}

template <class T>
std::vector<T> read(const SafetensorsFile& file, const std::string& name, Shape shape, bool finite = true) {
  std::vector<T> values(static_cast<std::size_t>(shape.size()));
  EXPECT_EQ(file.read(name, Tensor{values.data(), dtype_of<T>(), shape}), finite) << name;
  return values;
}

// ---- valid files ----

TEST(Safetensors, ReadsEveryConversion) {
  // An odd header, so that nothing is aligned; tensors in the header in another order than their data.
  std::string header =
      R"({"i":{"dtype":"I32","shape":[2],"data_offsets":[28,36]},"d":{"dtype":"F64","shape":[1,2],"data_offsets":[0,16]},)"
      R"("f":{"dtype":"F32","shape":[1],"data_offsets":[16,20]},"__metadata__":{"format":"pt","empty":""},)"
      R"("h":{"dtype":"F16","shape":[2],"data_offsets":[20,24]},"b":{"data_offsets":[24,28],"shape":[2,1,1],"dtype":"BF16"},)"
      R"("none":{"dtype":"F32","shape":[3,0,9223372036854775807],"data_offsets":[16,16]},)"
      R"("scalar":{"dtype":"F64","shape":[],"data_offsets":[36,44]},"\u00e9\n":{"dtype":"U8","shape":[1],"data_offsets":[44,45]}})";
  if (header.size() % 2 == 0) header += ' ';
  const std::string data = raw({1.0 / 3, -2.5}) + raw({0.1f}) + raw<std::uint16_t>({0x3555, 0x8001}) +
                           raw<std::uint16_t>({0x3f81, 0xc000}) + raw<std::int32_t>({-7, 2147483647}) + raw({1e300}) +
                           "\x05";
  const InMemory file(file_of(header, data));
  EXPECT_EQ(file->entries().size(), 8u);
  EXPECT_EQ(file->metadata(), (std::map<std::string, std::string>{{"format", "pt"}, {"empty", ""}}));
  EXPECT_EQ(file->path(), "m.safetensors");
  EXPECT_TRUE(file->contains("d"));
  EXPECT_FALSE(file->contains("__metadata__"));

  EXPECT_EQ(read<double>(file.file, "d", {1, 2}), (std::vector{1.0 / 3, -2.5}));
  EXPECT_EQ(read<float>(file.file, "d", {1, 2}), (std::vector{1.0f / 3, -2.5f}));
  EXPECT_EQ(read<float>(file.file, "f", {1}), std::vector{0.1f});
  EXPECT_EQ(read<double>(file.file, "f", {1}), std::vector{static_cast<double>(0.1f)});
  // half 0x3555: 2^-2 * (1 + 0x155/1024); 0x8001: the smallest subnormal, negative; bfloat16 0x3f81: 1 + 1/128
  EXPECT_EQ(read<double>(file.file, "h", {2}), (std::vector{0.25 * (1 + 341.0 / 1024), -0x1p-24}));
  EXPECT_EQ(read<float>(file.file, "b", {2, 1, 1}), (std::vector{1.0078125f, -2.0f}));
  EXPECT_EQ(read<double>(file.file, "b", {2, 1, 1}), (std::vector{1.0078125, -2.0}));
  EXPECT_EQ(read<std::int32_t>(file.file, "i", {2}), (std::vector{-7, 2147483647}));
  EXPECT_EQ(read<double>(file.file, "scalar", {}), std::vector{1e300});
  EXPECT_EQ(read<float>(file.file, "scalar", {}, false), std::vector{std::numeric_limits<float>::infinity()});
  EXPECT_EQ(file->at("none").elements(), 0);
  EXPECT_EQ(file->at("i").elements(), 2);
  EXPECT_EQ(file->at("scalar").elements(), 1);
  EXPECT_EQ(file->at("\u00e9\n").data[0], std::byte{5});
}

TEST(Safetensors, SaysWhetherAllIsFinite) {
  const std::string header =
      R"({"h":{"dtype":"F16","shape":[3],"data_offsets":[0,6]},"b":{"dtype":"BF16","shape":[2],"data_offsets":[6,10]},)"
      R"("f":{"dtype":"F32","shape":[2],"data_offsets":[10,18]},"d":{"dtype":"F64","shape":[1],"data_offsets":[18,26]}})";
  const InMemory file(file_of(header, raw<std::uint16_t>({0x7bff, 0x7c00, 0xfe00}) + raw<std::uint16_t>({0, 0xff80}) +
                                          raw({1.0f, NAN}) + raw(std::initializer_list<double>{-INFINITY})));
  const auto half = read<double>(file.file, "h", {3}, false);
  EXPECT_EQ(half[0], 65504);
  EXPECT_EQ(half[1], INFINITY);
  EXPECT_TRUE(std::isnan(half[2]));
  EXPECT_EQ(read<double>(file.file, "b", {2}, false), (std::vector<double>{0, -INFINITY}));
  EXPECT_TRUE(std::isnan(read<float>(file.file, "f", {2}, false)[1]));
  read<double>(file.file, "d", {1}, false);
}

TEST(Safetensors, AFileWithoutTensors) {
  EXPECT_TRUE(InMemory(file_of("{}"))->entries().empty());
  EXPECT_TRUE(InMemory(file_of("{} \n "))->entries().empty());
  EXPECT_TRUE(InMemory(file_of(R"({"__metadata__":{}})"))->metadata().empty());
}

TEST(Safetensors, ReadingAsksForTheRightTensor) {
  const InMemory file(file_of(R"({"f":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
                              R"("l":{"dtype":"I64","shape":[1],"data_offsets":[24,32]}})",
                              std::string(32, '\0')));
  std::array<double, 6> memory{};
  const auto into = [&](const std::string& name, DType dtype, Shape shape) {
    return [&, name, dtype, shape] { file->read(name, Tensor{memory.data(), dtype, shape}); };
  };
  expect_error(Exit::data, R"([safetensors] m.safetensors: has no tensor "g")", into("g", DType::f32, {2, 3}));
  expect_error(Exit::data, R"(has no tensor "a\nb")", [&] { file->at("a\nb"); });
  expect_error(Exit::data, R"(tensor "f": shape is (2, 3), expected (3, 2))", into("f", DType::f32, {3, 2}));
  expect_error(Exit::data, R"(tensor "f": shape is (2, 3), expected (6))", into("f", DType::f32, {6}));
  expect_error(Exit::data, R"(tensor "l": shape is (1), expected ())", into("l", DType::f32, {}));
  expect_error(Exit::data, R"(tensor "f": dtype is F32, expected I32)", into("f", DType::i32, {2, 3}));
  expect_error(Exit::data, R"(tensor "l": dtype is I64, expected F64, F32, F16 or BF16)", into("l", DType::f64, {1}));
  expect_error(Exit::data, R"(tensor "l": dtype is I64, expected I32)", into("l", DType::i32, {1}));
  EXPECT_THROW(into("f", DType::bf16, {2, 3})(), std::exception);
}

TEST(Safetensors, ReadsAnyPart) {
  const InMemory file(file_of(R"({"h":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},)"
                              R"("none":{"dtype":"F32","shape":[0,3],"data_offsets":[12,12]}})",
                              raw<std::uint16_t>({0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x7f80})));
  const std::vector<double> whole{1, 2, 3, 4, 5, INFINITY};
  for (std::int64_t first = 0; first <= 6; ++first)
    for (std::int64_t n = 0; first + n <= 6; ++n) {
      std::vector<double> part(static_cast<std::size_t>(n) + 1, 77);  // and a sentinel
      EXPECT_EQ(file->read("h", Tensor{part.data(), DType::f64, {n}}, first), first + n < 6 || n == 0);
      EXPECT_TRUE(std::equal(part.begin(), part.end() - 1, whole.begin() + first)) << first << " " << n;
      EXPECT_EQ(part.back(), 77);
    }
  std::array<float, 7> memory{};
  EXPECT_TRUE(file->read("none", Tensor{memory.data(), DType::f32, {0}}, 0));
  EXPECT_THROW(file->read("h", Tensor{memory.data(), DType::f32, {7}}, 0), std::logic_error);
  EXPECT_THROW(file->read("h", Tensor{memory.data(), DType::f32, {1}}, 6), std::logic_error);
  EXPECT_THROW(file->read("h", Tensor{memory.data(), DType::f32, {1}}, -1), std::logic_error);
  EXPECT_THROW(file->read("h", Tensor{memory.data(), DType::f32, {1}}, INT64_MAX), std::logic_error);
  expect_error(Exit::data, "dtype is BF16, expected I32", [&] {
    file->read("h", Tensor{memory.data(), DType::i32, {1}}, 0);
  });
}

// ---- files of others ----

std::vector<std::filesystem::path> golden_files() {
  std::vector<std::filesystem::path> found;
  for (const auto& file : std::filesystem::recursive_directory_iterator(ROWNORM_GOLDEN))
    if (file.path().extension() == ".safetensors") found.push_back(file.path());
  return found;
}

Shape shape_of(const std::vector<std::int64_t>& s) {
  return s.size() == 1 ? Shape{s[0]} : s.size() == 2 ? Shape{s[0], s[1]} : Shape{};
}

// Every golden file is read, and writing it anew gives the same bytes as the generator's own writer did.
TEST(Safetensors, GoldenFilesReadAndWriteBack) {
  const TemporaryFolder folder;
  ASSERT_GE(golden_files().size(), 14u);
  for (const auto& path : golden_files()) {
    SCOPED_TRACE(path.filename());
    const SafetensorsFile file(path);
    std::vector<std::pair<std::string, const SafetensorsFile::Entry*>> in_order;
    for (const auto& [name, entry] : file.entries()) {
      in_order.emplace_back(name, &entry);
      if (entry.dtype == "I32") {
        read<std::int32_t>(file, name, shape_of(entry.shape));
      } else {
        const auto wide = golden::values(file, name);
        EXPECT_TRUE(std::all_of(wide.begin(), wide.end(), [](double v) { return std::isfinite(v); })) << name;
      }
    }
    std::sort(in_order.begin(), in_order.end(),
              [](const auto& a, const auto& b) { return a.second->data.data() < b.second->data.data(); });
    std::vector<SafetensorsWriter::Declaration> declarations;
    for (const auto& [name, entry] : in_order) {
      const DType dtype = entry->dtype == "F64" ? DType::f64 : entry->dtype == "F32" ? DType::f32 : DType::i32;
      declarations.push_back({name, dtype, entry->shape});
    }
    SafetensorsWriter writer(folder / "copy", declarations);
    for (const auto& [name, entry] : in_order) writer.write(entry->data.data(), entry->data.size());
    writer.close();
    EXPECT_TRUE(read_text("copy", folder / "copy") == read_text("golden", path));
  }
}

TEST(Safetensors, GoldenValuesAreTheGenerators) {
  const SafetensorsFile file(golden::path("clip.safetensors"));
  const auto cases = golden::json("clip.json").at("cases");
  EXPECT_GE(cases.size(), 7u);
  for (const auto& expected : cases) {
    double squares = 0;
    for (int i = 0; i < expected.at("tensors"); ++i)
      for (const double v : golden::values(file, fmt::format("{}/grad{}", expected.at("name").get<std::string>(), i)))
        squares += v * v;
    const double norm = expected.at("norm");
    EXPECT_NEAR(std::sqrt(squares), norm, 1e-14 * norm);  // double rounding of a sum of about 100 squares
  }
}

// ---- writing ----

TEST(Safetensors, WritesWhatItReads) {
  const TemporaryFolder folder;
  const std::vector<SafetensorsWriter::Declaration> declarations{
      {"z/first", DType::f32, {3, 1}},
      {"a \"quoted\"", DType::bf16, {1}},
      {"none", DType::f64, {0, 5}},
      {"scalar", DType::i32, {}},
  };
  const std::string data = raw({1.5f, -0.0f, 1e-45f}) + raw<std::uint16_t>({0x3f80}) + raw({-9});
  const auto write = [&](const std::string& name) {
    SafetensorsWriter writer(folder / name, declarations);
    for (const char& c : data) writer.write(&c, 1);
    writer.close();
    return read_text("written", folder / name);
  };
  const std::string text = write("x");
  EXPECT_EQ(text, write("y"));
  EXPECT_EQ((text.size() - data.size()) % 8, 0u);
  EXPECT_EQ(text.substr(text.size() - data.size()), data);

  const SafetensorsFile file(folder / "x");
  EXPECT_EQ(file.entries().size(), 4u);
  EXPECT_EQ(read<float>(file, "z/first", {3, 1}), (std::vector{1.5f, -0.0f, 1e-45f}));
  EXPECT_EQ(read<float>(file, "a \"quoted\"", {1}), std::vector{1.0f});
  EXPECT_EQ(read<std::int32_t>(file, "scalar", {}), std::vector{-9});
  EXPECT_EQ(file.at("none").elements(), 0);
}

TEST(Safetensors, WritingAsksForWhatWasDeclared) {
  const TemporaryFolder folder;
  {
    SafetensorsWriter writer(folder / "x", {{"a", DType::f64, {2}}});
    writer.write("12345678", 8);
    EXPECT_THROW(writer.close(), std::logic_error);
  }
  EXPECT_TRUE(folder.empty());
  {
    SafetensorsWriter writer(folder / "x", {{"a", DType::u8, {2}}});
    writer.write("123", 3);
    EXPECT_THROW(writer.close(), std::logic_error);
  }
  EXPECT_THROW(SafetensorsWriter(folder / "x", {{"a", DType::u8, {2}}, {"a", DType::u8, {1}}}), std::logic_error);
  EXPECT_TRUE(folder.empty());
}

// ---- invalid files ----

TEST(Safetensors, EachFaultHasItsLine) {
  const std::string good = R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
  const auto info = [](const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return R"({"a":{"dtype":)" + dtype + R"(,"shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}";
  };
  const struct {
    std::string bytes, part;
  } cases[] = {
      {"", "holds 0 bytes, too few for a header"},
      {"1234567", "holds 7 bytes, too few for a header"},
      {le(0), "the header does not begin with '{'"},
      {le(1) + "{", "byte 2 of the header is not valid JSON"},
      {le(3) + "{}", "a header of 3 bytes, the file holds 2 (truncated?)"},
      {le(100'000'001) + "{}", "a header of 100000001 bytes, at most 100000000 are allowed"},
      {le(~0ull) + "{}", "a header of 18446744073709551615 bytes, at most"},
      {file_of(" {}"), "the header does not begin with '{'"},
      {file_of("[]"), "the header does not begin with '{'"},
      {file_of("{}}"), "byte 3 of the header is not valid JSON"},
      {file_of("{}x"), "byte 3 of the header is not valid JSON"},
      {file_of(std::string("{}\0x", 4)), "byte 2 of the header is zero"},
      {file_of("{\"a\xff\":1}"), "of the header is not valid JSON"},
      {file_of("{\"a\":1e999}"), "a number in the header is out of range"},
      {file_of("{}", "x"), "the tensors take 0 bytes, the file holds 1"},
      {file_of("{" + good + "}", "1234567"), "data_offsets [0, 8) in 7 bytes of data (truncated?)"},
      {file_of("{" + good + "}", "123456789"), "the tensors take 8 bytes, the file holds 9"},
      {file_of("{" + good + "," + good + "}", "12345678"), "the header holds \"a\" twice"},
      {file_of(R"({"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}})", "12345678"),
       "the header holds \"dtype\" twice"},
      {file_of(R"({"a":1})"), "tensor \"a\": expected an object with the keys dtype, shape and data_offsets"},
      {file_of(R"({"a":[]})"), "the header holds a list at depth 1"},
      {file_of(R"({"a":{"dtype":"F32","shape":[2]}})"), "expected an object with the keys"},
      {file_of(R"({"a":{"dtype":"F32","shape":[2],"offsets":[0,8]}})", "12345678"), "expected an object with the keys"},
      {file_of(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"more":1}})", "12345678"),
       "expected an object with the keys"},
      {file_of(R"({"a":{"dtype":{},"shape":[2],"data_offsets":[0,8]}})"), "the header holds an object at depth 2"},
      {file_of(info("\"F32\"", "[[2]]", "[0,8]")), "the header holds a list at depth 3"},
      {file_of(info("7", "[2]", "[0,8]"), "12345678"), "dtype is 7, expected a text"},
      {file_of(info("[7]", "[2]", "[0,8]"), "12345678"), "dtype is a list, expected a text"},
      {file_of(info("\"f32\"", "[2]", "[0,8]"), "12345678"), "unknown dtype \"f32\""},
      {file_of(info("\"F4\\n\"", "[2]", "[0,8]"), "12345678"), "unknown dtype \"F4\\n\""},
      {file_of(info("\"F32\"", "2", "[0,8]"), "12345678"), "shape is 2, expected a list"},
      {file_of(info("\"F32\"", "null", "[0,8]"), "12345678"), "shape is null, expected a list"},
      {file_of(info("\"F32\"", "[-2]", "[0,8]"), "12345678"), "shape holds -2, expected integers in [0, 2^63)"},
      {file_of(info("\"F32\"", "[2.0]", "[0,8]"), "12345678"), "shape holds 2.0, expected integers"},
      {file_of(info("\"F32\"", "[\"2\"]", "[0,8]"), "12345678"), "shape holds \"2\", expected integers"},
      {file_of(info("\"F32\"", "[9223372036854775808]", "[0,8]"), "12345678"), "shape holds 9223372036854775808,"},
      {file_of(info("\"F32\"", "[99999999999999999999]", "[0,8]"), "12345678"), "shape holds 1e+20,"},
      {file_of(info("\"F32\"", "[4611686018427387904]", "[0,0]")), "shape (4611686018427387904) exceeds 2^63 bytes"},
      {file_of(info("\"F64\"", "[4294967296,4294967296,0]", "[0,0]")), "exceeds 2^63 bytes"},
      {file_of(info("\"F64\"", "[2147483648,2147483648,8]", "[0,0]")), "exceeds 2^63 bytes"},  // 2^65, 0 modulo 2^64
      {file_of(info("\"F32\"", "[3]", "[0,8]"), "12345678"), "data_offsets span 8 bytes, F32 (3) takes 12"},
      {file_of(info("\"F32\"", "[2]", "[0]"), "12345678"), "data_offsets has 1 numbers, expected 2"},
      {file_of(info("\"F32\"", "[2]", "[0,8,16]"), "12345678"), "data_offsets has 3 numbers, expected 2"},
      {file_of(info("\"F32\"", "[2]", "[8,0]"), "12345678"), "data_offsets [8, 0) in 8 bytes of data"},
      {file_of(info("\"F32\"", "[2]", "[0,9223372036854775807]"), "12345678"), "in 8 bytes of data (truncated?)"},
      {file_of(info("\"F32\"", "[2]", "[-8,0]"), "12345678"), "data_offsets holds -8, expected integers"},
      {file_of(info("\"F32\"", "[2]", "[1,9]"), "123456789"), "begins at byte 1 of the data, after a hole"},
      {file_of("{" + good + R"(,"b":{"dtype":"U8","shape":[4],"data_offsets":[7,11]}})", "12345678901"),
       "tensor \"b\": begins at byte 7 of the data, inside another that ends at 8"},
      {file_of("{" + good + R"(,"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", "12345678"), "inside another"},
      {file_of("{" + good + R"(,"b":{"dtype":"U8","shape":[0],"data_offsets":[4,4]}})", "12345678"), "inside another"},
      {file_of("{" + good + R"(,"b":{"dtype":"U8","shape":[1],"data_offsets":[9,10]}})", "1234567890"),
       "tensor \"b\": begins at byte 9 of the data, after a hole that begins at 8"},
      {file_of(R"({"__metadata__":null})"), "__metadata__ is not an object of texts"},
      {file_of(R"({"__metadata__":"text"})"), "__metadata__ is not an object of texts"},
      {file_of(R"({"__metadata__":{"a":1}})"), "__metadata__ is not an object of texts"},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.bytes.size() > 8 ? c.bytes.substr(8) : c.bytes);
    expect_error(Exit::data, "[safetensors] m.safetensors: ", [&] { InMemory{c.bytes}; });
    expect_error(Exit::data, c.part, [&] { InMemory{c.bytes}; });
  }
}

TEST(Safetensors, FilesThatAreNoFiles) {
  const TemporaryFolder folder;
  expect_error(Exit::data, "[safetensors] " + (folder / "none").string() + ": no such file",
               [&] { SafetensorsFile(folder / "none"); });
  expect_error(Exit::data, "is a folder", [&] { SafetensorsFile{folder.path}; });
}

// What a header claims or how deep it is costs no memory: nothing larger than a few times the file is ever allocated.
TEST(Safetensors, BombsAreHarmless) {
  const auto repeated = [](const std::string& text, int times) {
    std::string all;
    for (int i = 0; i < times; ++i) all += text;
    return all;
  };
  const std::string bombs[] = {
      file_of("{\"a\":" + repeated("[", 1'000'000)),
      file_of(repeated("{\"a\":", 200'000)),
      file_of(R"({"a":{"dtype":"F32","shape":[)" + repeated("1,", 500'000) + "1],\"data_offsets\":[0,4]}}", "1234"),
      file_of(R"({"a":[)" + repeated("1,", 500'000) + "1]}"),
      file_of("{\"" + repeated("x", 1'000'000)),
      file_of("{\"a\":" + repeated("9", 1'000'000) + "}"),
      file_of(R"({"a":{"dtype":"F64","shape":[1152921504606846975],"data_offsets":[0,9223372036854775800]}})"),
      file_of(R"({"a":{"dtype":"F64","shape":[1125899906842624],"data_offsets":[0,9007199254740992]}})", "12345678"),
  };
  for (const std::string& bomb : bombs) {
    const InMemory* none = nullptr;
    largest_allocation = 0;
    expect_error(Exit::data, "[safetensors] m.safetensors: ", [&] { none = new InMemory(bomb); });
    EXPECT_EQ(none, nullptr);
    EXPECT_LE(largest_allocation, 4 * bomb.size() + 10'000) << bomb.substr(8, 100);
  }
}

}  // namespace
}  // namespace rownorm
