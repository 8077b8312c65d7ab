#include "base/safetensors.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "base/bf16.h"
#include "base/error.h"

namespace rownorm {

static_assert(std::endian::native == std::endian::little, "the format's numbers are copied as they are");

namespace {

using nlohmann::json;

constexpr std::uint64_t max_header_bytes = 100'000'000;  // the format's own limit
constexpr int max_rank = 64;

constexpr std::array<std::pair<std::string_view, std::int64_t>, 17> element_bytes{{
    {"F64", 8},
    {"F32", 4},
    {"F16", 2},
    {"BF16", 2},
    {"I64", 8},
    {"I32", 4},
    {"I16", 2},
    {"I8", 1},
    {"U64", 8},
    {"U32", 4},
    {"U16", 2},
    {"U8", 1},
    {"BOOL", 1},
    {"C64", 8},
    {"F8_E4M3", 1},
    {"F8_E5M2", 1},
    {"F8_E8M0", 1},
}};

// A value of a file, fit for one line of a message: control characters escaped, cut when long.
std::string printable(const json& value) {
  constexpr std::size_t most = 100;
  if (value.is_structured()) return value.is_array() ? "a list" : "an object";
  const std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  return text.size() <= most ? text : text.substr(0, most) + "...";
}

std::string str(const std::vector<std::int64_t>& shape) { return fmt::format("({})", fmt::join(shape, ", ")); }

// The header as JSON. Unlike json::parse alone: a duplicate key is an error, and so is any nesting that the format does
// not have, before it takes memory.
json parse_header(const std::string& where, std::string_view text) {
  if (text.empty() || text.front() != '{')
    fail(Exit::data, "[safetensors] {}: the header does not begin with '{{'", where);
  // json::parse takes a zero byte for the end of the text.
  if (const std::size_t zero = text.find('\0'); zero != text.npos)
    fail(Exit::data, "[safetensors] {}: byte {} of the header is zero, expected JSON", where, zero);
  std::vector<std::set<std::string>> keys;  // of each object that is open
  int length = 0;                           // of the list that is open
  using Event = json::parse_event_t;
  const auto check = [&](int depth, Event event, const json& parsed) {
    if ((event == Event::object_start && depth > 1) || (event == Event::array_start && depth != 2))
      fail(Exit::data, "[safetensors] {}: the header holds {} at depth {}, where the format has none", where,
           event == Event::array_start ? "a list" : "an object", depth);
    if (event == Event::array_start) length = 0;
    if (event == Event::value && depth == 3 && ++length > max_rank)
      fail(Exit::data, "[safetensors] {}: the header holds a list of more than {} numbers", where, max_rank);
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    if (event == Event::key && !keys.back().insert(parsed.get_ref<const std::string&>()).second)
      fail(Exit::data, "[safetensors] {}: the header holds {} twice", where, printable(parsed));
    return true;
  };
  try {
    return json::parse(text, check);
  } catch (const json::parse_error& error) {
    fail(Exit::data, "[safetensors] {}: byte {} of the header is not valid JSON", where, error.byte);
  } catch (const json::exception&) {
    fail(Exit::data, "[safetensors] {}: a number in the header is out of range", where);
  }
}

std::vector<std::int64_t> integers(const std::string& where, const char* key, const json& list) {
  if (!list.is_array()) fail(Exit::data, "{}: {} is {}, expected a list", where, key, printable(list));
  std::vector<std::int64_t> values;
  for (const json& value : list) {
    if (!value.is_number_unsigned() || value.get<std::uint64_t>() > std::numeric_limits<std::int64_t>::max())
      fail(Exit::data, "{}: {} holds {}, expected integers in [0, 2^63)", where, key, printable(value));
    values.push_back(value.get<std::int64_t>());
  }
  return values;
}

// One tensor of the header, over the bytes that follow it.
SafetensorsFile::Entry parse_entry(const std::string& where, const json& info, std::span<const std::byte> data) {
  if (!info.is_object() || info.size() != 3 || !info.contains("dtype") || !info.contains("shape") ||
      !info.contains("data_offsets"))
    fail(Exit::data, "{}: expected an object with the keys dtype, shape and data_offsets", where);
  const json& dtype = info["dtype"];
  if (!dtype.is_string()) fail(Exit::data, "{}: dtype is {}, expected a text", where, printable(dtype));
  SafetensorsFile::Entry entry{dtype.get<std::string>(), integers(where, "shape", info["shape"]), {}};

  const auto known = std::find_if(element_bytes.begin(), element_bytes.end(),
                                  [&](const auto& candidate) { return candidate.first == entry.dtype; });
  if (known == element_bytes.end()) fail(Exit::data, "{}: unknown dtype {}", where, printable(entry.dtype));
  std::int64_t bytes = known->second;
  for (const std::int64_t n : entry.shape)
    if (__builtin_mul_overflow(bytes, n, &bytes))
      fail(Exit::data, "{}: shape {} exceeds 2^63 bytes", where, str(entry.shape));

  const std::vector<std::int64_t> offsets = integers(where, "data_offsets", info["data_offsets"]);
  if (offsets.size() != 2) fail(Exit::data, "{}: data_offsets has {} numbers, expected 2", where, offsets.size());
  if (offsets[0] > offsets[1] || static_cast<std::uint64_t>(offsets[1]) > data.size())
    fail(Exit::data, "{}: data_offsets [{}, {}) in {} bytes of data (truncated?)", where, offsets[0], offsets[1],
         data.size());
  if (offsets[1] - offsets[0] != bytes)
    fail(Exit::data, "{}: data_offsets span {} bytes, {} {} takes {}", where, offsets[1] - offsets[0], entry.dtype,
         str(entry.shape), bytes);
  entry.data = data.subspan(static_cast<std::size_t>(offsets[0]), static_cast<std::size_t>(bytes));
  return entry;
}

// Every byte of the data belongs to exactly one tensor.
void check_tiling(const std::string& where, const std::map<std::string, SafetensorsFile::Entry>& entries,
                  std::span<const std::byte> data) {
  std::vector<std::tuple<std::ptrdiff_t, std::ptrdiff_t, const std::string*>> ranges;
  for (const auto& [name, entry] : entries) {
    const std::ptrdiff_t begin = entry.data.data() - data.data();
    ranges.emplace_back(begin, begin + std::ssize(entry.data), &name);
  }
  std::sort(ranges.begin(), ranges.end());
  std::ptrdiff_t at = 0;
  for (const auto& [begin, end, name] : ranges) {
    if (begin != at)
      fail(Exit::data, "[safetensors] {}: tensor {}: begins at byte {} of the data, {} {}", where, printable(*name),
           begin, begin < at ? "inside another that ends at" : "after a hole that begins at", at);
    at = end;
  }
  if (at != std::ssize(data))
    fail(Exit::data, "[safetensors] {}: the tensors take {} bytes, the file holds {}", where, at, data.size());
}

template <class T>
T load(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

double half_to_double(std::uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  double value = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  if (exponent == 31) value = fraction ? NAN : INFINITY;
  return bits >> 15 ? -value : value;
}

// Converts n elements by `from`; true if all are finite in the destination's type.
template <class Stored, class T, class Convert>
bool convert(T* to, std::span<const std::byte> data, Convert from) {
  bool finite = true;
  for (std::size_t i = 0; i < data.size() / sizeof(Stored); ++i) {
    to[i] = static_cast<T>(from(load<Stored>(data.data() + i * sizeof(Stored))));
    finite &= std::isfinite(to[i]);
  }
  return finite;
}

template <class T>
bool convert_floats(const std::string& where, T* to, const SafetensorsFile::Entry& entry) {
  if (entry.dtype == "F64") return convert<double>(to, entry.data, [](double x) { return x; });
  if (entry.dtype == "F32") return convert<float>(to, entry.data, [](float x) { return x; });
  if (entry.dtype == "F16") return convert<std::uint16_t>(to, entry.data, half_to_double);
  if (entry.dtype == "BF16") return convert<std::uint16_t>(to, entry.data, from_bf16);
  fail(Exit::data, "{}: dtype is {}, expected F64, F32, F16 or BF16", where, entry.dtype);
}

const char* format_name(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return "F64";
    case DType::f32:
      return "F32";
    case DType::bf16:
      return "BF16";
    case DType::i32:
      return "I32";
    case DType::u8:
      return "U8";
  }
  throw std::logic_error("[safetensors] unknown dtype");
}

}  // namespace

std::int64_t SafetensorsFile::Entry::elements() const {
  std::int64_t product = 1;
  for (const std::int64_t n : shape) product *= n;
  return product;
}

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path) {
  MappedFile file("safetensors", path);
  *this = SafetensorsFile(file.bytes(), path);
  file_ = std::move(file);
}

SafetensorsFile::SafetensorsFile(std::span<const std::byte> bytes, const std::filesystem::path& name) : path_(name) {
  const std::string where = name.string();
  if (bytes.size() < sizeof(std::uint64_t))
    fail(Exit::data, "[safetensors] {}: holds {} bytes, too few for a header (truncated?)", where, bytes.size());
  const auto length = load<std::uint64_t>(bytes.data());
  bytes = bytes.subspan(sizeof length);
  if (length > max_header_bytes)
    fail(Exit::data, "[safetensors] {}: a header of {} bytes, at most {} are allowed (not a safetensors file?)", where,
         length, max_header_bytes);
  if (length > bytes.size())
    fail(Exit::data, "[safetensors] {}: a header of {} bytes, the file holds {} (truncated?)", where, length,
         bytes.size());
  const auto header_bytes = static_cast<std::size_t>(length);
  const std::span<const std::byte> data = bytes.subspan(header_bytes);

  const json header = parse_header(where, {reinterpret_cast<const char*>(bytes.data()), header_bytes});
  for (const auto& [tensor, info] : header.items()) {
    if (tensor == "__metadata__") {
      if (!info.is_object() || !std::all_of(info.begin(), info.end(), [](const json& v) { return v.is_string(); }))
        fail(Exit::data, "[safetensors] {}: __metadata__ is not an object of texts", where);
      metadata_ = info.get<std::map<std::string, std::string>>();
    } else {
      entries_.emplace(tensor,
                       parse_entry(fmt::format("[safetensors] {}: tensor {}", where, printable(tensor)), info, data));
    }
  }
  check_tiling(where, entries_, data);
}

const SafetensorsFile::Entry& SafetensorsFile::at(const std::string& name) const {
  const auto entry = entries_.find(name);
  if (entry == entries_.end()) fail(Exit::data, "[safetensors] {}: has no tensor {}", path_.string(), printable(name));
  return entry->second;
}

bool SafetensorsFile::read(const std::string& name, Tensor host) const {
  const Entry& entry = at(name);
  const std::string where = fmt::format("[safetensors] {}: tensor {}", path_.string(), printable(name));
  bool same = std::ssize(entry.shape) == host.shape.rank();
  for (int i = 0; same && i < host.shape.rank(); ++i) same = entry.shape[static_cast<std::size_t>(i)] == host.dim(i);
  if (!same) fail(Exit::data, "{}: shape is {}, expected {}", where, str(entry.shape), host.shape.str());
  return read(name, host, 0);
}

bool SafetensorsFile::read(const std::string& name, Tensor host, std::int64_t first) const {
  Entry part = at(name);
  const std::string where = fmt::format("[safetensors] {}: tensor {}", path_.string(), printable(name));
  const std::int64_t elements = part.elements();
  if (first < 0 || first > elements || host.size() > elements - first)
    throw std::logic_error(fmt::format("{}: elements {} + {} of {}", where, first, host.size(), elements));
  const std::size_t element = elements == 0 ? 0 : part.data.size() / static_cast<std::size_t>(elements);
  part.data =
      part.data.subspan(static_cast<std::size_t>(first) * element, static_cast<std::size_t>(host.size()) * element);
  if (host.dtype == DType::f64) return convert_floats(where, host.as<double>(), part);
  if (host.dtype == DType::f32) return convert_floats(where, host.as<float>(), part);
  if (part.dtype != "I32") fail(Exit::data, "{}: dtype is {}, expected I32", where, part.dtype);
  return convert<std::int32_t>(host.as<std::int32_t>(), part.data, [](std::int32_t x) { return x; });
}

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path, const std::vector<Declaration>& tensors,
                                     const std::map<std::string, std::string>& metadata)
    : file_(path) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  for (const Declaration& tensor : tensors) {
    std::int64_t bytes = size_of(tensor.dtype);
    for (const std::int64_t n : tensor.shape) bytes *= n;
    if (header.contains(tensor.name)) throw std::logic_error("[safetensors] " + tensor.name + " is declared twice");
    header[tensor.name] = {{"dtype", format_name(tensor.dtype)},
                           {"shape", tensor.shape},
                           {"data_offsets", {expected_, expected_ + bytes}}};
    expected_ += bytes;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // data begin on an 8-byte boundary
  const std::uint64_t length = text.size();
  file_.write(&length, sizeof length);
  file_.write(text.data(), text.size());
}

void SafetensorsWriter::write(const void* data, std::size_t bytes) {
  file_.write(data, bytes);
  written_ += static_cast<std::int64_t>(bytes);
}

void SafetensorsWriter::close() {
  if (written_ != expected_)
    throw std::logic_error(fmt::format("[safetensors] {} bytes written, {} declared", written_, expected_));
  file_.close();
}

}  // namespace rownorm
