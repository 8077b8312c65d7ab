#include "train/fields.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

namespace rownorm::fields {

// ---- Text ----

std::string shown(const Json& value) {
  const std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  return text.size() <= 80 ? text : text.substr(0, 77) + "...";
}

std::string join(const std::string& path, const std::string& key) {
  const bool plain = !key.empty() && key.size() <= 60 && std::ranges::all_of(key, [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-';
  });
  return (path.empty() ? "" : path + ".") + (plain ? key : shown(key));
}

const std::string& Source::of(std::string_view path) const {
  const auto within = [](std::string_view inner, std::string_view outer) {
    return inner.starts_with(outer) &&
           (inner.size() == outer.size() || inner[outer.size()] == '.' || inner[outer.size()] == '[');
  };
  for (auto last = overrides.rbegin(); last != overrides.rend(); ++last)
    if (within(path, last->first) || within(last->first, path)) return last->second;
  return file;
}

namespace {

constexpr std::size_t deepest = 16;  // nesting of objects and arrays; a config needs 4

// Text that will become the value of `above` in a config ("": all of it). Broken syntax throws Json::parse_error;
// duplicate keys and numbers that no double holds are Errors.
Json parse_json(const std::string& text, const std::string& where, const std::string& above, bool comments) {
  std::vector<std::string> path;
  std::vector<std::set<std::string>> seen;
  const auto here = [&] { return std::accumulate(path.begin(), path.end(), above, join); };
  const auto watch = [&](int depth, Json::parse_event_t event, Json& parsed) {
    if (static_cast<std::size_t>(depth) > deepest)
      fail(Exit::usage, "[config] {}: nested more than {} deep", where, deepest);
    if (event == Json::parse_event_t::object_start) {
      path.emplace_back();
      seen.emplace_back();
    } else if (event == Json::parse_event_t::object_end) {
      path.pop_back();
      seen.pop_back();
    } else if (event == Json::parse_event_t::key) {
      path.back() = parsed.get<std::string>();
      if (!seen.back().insert(path.back()).second) fail(Exit::usage, "[config] {}: {}: duplicate key", where, here());
    }
    return true;
  };
  try {
    return Json::parse(text, watch, true, comments);
  } catch (const Json::out_of_range& error) {  // "[json.exception.out_of_range.406] number overflow parsing '1e999'"
    const std::string_view what = error.what();
    fail(Exit::usage, "[config] {}: {}: {}, must be a finite number", where,
         path.empty() && above.empty() ? "the value" : here(), what.substr(what.rfind(' ') + 1, 80));
  }
}

// The value of an override: JSON or, if it is not, a string.
Json parse_value(const std::string& text, const std::string& where, const std::string& path) {
  try {
    return parse_json(text, where, path, false);
  } catch (const Json::parse_error&) {
  }
  Json string = text;
  try {
    string.dump();
  } catch (const Json::type_error&) {
    fail(Exit::usage, "[config] {}: {}: {}, must be valid UTF-8", where, path, shown(string));
  }
  return string;
}

// Levenshtein distance: insertions, deletions and replacements of single characters.
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i + 1);
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i] != b[j]);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, diagonal + 1});
    }
  }
  return row.back();
}

}  // namespace

Json parse_text(const std::string& text, const std::string& where) {
  try {
    return parse_json(text, where, "", true);
  } catch (const Json::parse_error& error) {
    // "[json.exception.parse_error.101] parse error at line 3, column 5: syntax error while parsing ..."
    std::string_view what = error.what();
    for (const std::string_view before : {"] ", "parse error at "})
      if (const auto at = what.find(before); at != what.npos) what.remove_prefix(at + before.size());
    fail(Exit::usage, "[config] {}: not valid JSON: {}", where, what.substr(0, 200));
  }
}

std::string apply_override(Json& root, const std::string& argument, Source& source) {
  std::string line = argument.substr(0, 80) + (argument.size() > 80 ? "..." : "");
  std::ranges::replace_if(
      line, [](char c) { return static_cast<unsigned char>(c) < ' '; }, ' ');
  const std::string where = "--set " + line;

  const auto equals = argument.find('=');
  if (equals == argument.npos)
    fail(Exit::usage, "[config] {}: must be path=value, as in optimizer.head.lr=0.004", where);
  const std::string path = argument.substr(0, equals);

  Json* value = &root;
  std::string above;
  std::size_t begin = 0, depth = 0;
  while (begin <= path.size()) {
    const auto dot = std::min(path.find('.', begin), path.size());
    const std::string key = path.substr(begin, dot - begin);
    if (key.empty() || ++depth > deepest)
      fail(Exit::usage, "[config] {}: {} is not a path such as optimizer.head.lr", where, shown(path));
    if (!value->is_object() && !value->is_null())
      fail(Exit::usage, "[config] {}: {} is {}, which has no keys", where, above.empty() ? source.file : above,
           shown(*value));
    value = &(*value)[key];
    above = join(above, key);
    begin = dot + 1;
  }
  *value = parse_value(argument.substr(equals + 1), where, above);
  source.overrides.emplace_back(above, where);
  return above;
}

// ---- Reader ----

Reader::Reader(const Json& object, std::string path, const Source& source, std::string& missing)
    : object_(object), path_(std::move(path)), source_(source), missing_(missing) {
  if (!object_.is_object()) reject(object_, path_, "an object {...}");
}

const Json* Reader::find(const char* key) const {
  const auto found = object_.find(key);
  return found == object_.end() ? nullptr : &*found;
}

void Reader::reject(const Json& json, const std::string& path, const std::string& allowed) const {
  if (path.empty()) fail(Exit::usage, "[config] {}: the file is {}, must be {}", source_.file, shown(json), allowed);
  source_.reject(path, "{}, must be {}", shown(json), allowed);
}

void Reader::finish() const {
  for (const auto& item : object_.items()) {
    if (std::ranges::find(keys_, item.key()) != keys_.end()) continue;
    const std::string key = item.key().substr(0, 60);  // bounds the search
    const auto nearest = std::ranges::min_element(keys_, {}, [&](const auto& k) { return edit_distance(k, key); });
    source_.reject(join(path_, item.key()), "unknown key; did you mean {}?", *nearest);
  }
}

void Reader::read(const Json& json, const std::string& path, bool& value) const {
  if (!json.is_boolean()) reject(json, path, "true or false");
  value = json.get<bool>();
}

void Reader::read(const Json& json, const std::string& path, double& value, Range allowed) const {
  if (!json.is_number() || !allowed.holds(json.get<double>())) reject(json, path, "a number " + allowed.str());
  value = json.get<double>();
}

// 1e3 and 5.0 are integers too, as in JSON Schema; 1.5 is not, nor what a double cannot tell from its neighbour.
void Reader::read(const Json& json, const std::string& path, std::int64_t& value, Range allowed) const {
  const double x = json.is_number() ? json.get<double>() : NAN;
  if (x != std::floor(x) || !allowed.holds(x)) reject(json, path, "an integer " + allowed.str());
  if (x > static_cast<double>(largest_integer)) reject(json, path, fmt::format("at most {}", largest_integer));
  value = static_cast<std::int64_t>(x);
}

void Reader::read(const Json& json, const std::string& path, int& value, Range allowed) const {
  std::int64_t wide = 0;
  read(json, path, wide, allowed);
  value = static_cast<int>(wide);
}

void Reader::read(const Json& json, const std::string& path, std::uint64_t& value) const {
  if (!json.is_number_unsigned()) reject(json, path, "an integer in [0, 18446744073709551615]");
  value = json.get<std::uint64_t>();
}

void Reader::read(const Json& json, const std::string& path, std::string& value) const {
  const auto printable = [](char c) { return static_cast<unsigned char>(c) >= ' ' && c != '\x7f'; };
  if (json.is_string()) value = json.get<std::string>();
  if (!json.is_string() || value.empty() || !std::ranges::all_of(value, printable))
    reject(json, path, "a non-empty string without control characters");
}

void Reader::read(const Json& json, const std::string& path, std::string& value, Words words) const {
  value = words.begin()[index_of(json, path, words)];
}

std::size_t Reader::index_of(const Json& json, const std::string& path, Words words) const {
  const auto found = std::ranges::find_if(words, [&](const char* word) { return json == word; });
  if (found == words.end()) reject(json, path, fmt::format("one of {}", fmt::join(words, ", ")));
  return static_cast<std::size_t>(found - words.begin());
}

void Reader::read(const Json& json, const std::string& path, std::array<double, 2>& value, Range allowed) const {
  if (!json.is_array() || json.size() != 2) reject(json, path, "an array of two numbers");
  for (std::size_t i = 0; i < 2; ++i) read(json[i], fmt::format("{}[{}]", path, i), value[i], allowed);
}

void Reader::read(const Json& json, const std::string& path, std::vector<std::int64_t>& value, Range allowed) const {
  if (!json.is_array()) reject(json, path, "an array of integers");
  value.resize(json.size());
  for (std::size_t i = 0; i < value.size(); ++i) read(json[i], fmt::format("{}[{}]", path, i), value[i], allowed);
}

void Reader::read(const Json& json, const std::string& path,
                  std::vector<std::pair<std::int64_t, std::int64_t>>& value) const {
  if (!json.is_array()) reject(json, path, "an array of [begin, end] pairs");
  value.resize(json.size());
  for (std::size_t i = 0; i < value.size(); ++i) {
    const std::string at = fmt::format("{}[{}]", path, i);
    if (!json[i].is_array() || json[i].size() != 2) reject(json[i], at, "a pair [begin, end]");
    read(json[i][0], at + "[0]", value[i].first, at_least(0));
    read(json[i][1], at + "[1]", value[i].second, at_least(0));
  }
}

}  // namespace rownorm::fields
