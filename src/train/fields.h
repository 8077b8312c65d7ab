// Reading and writing a JSON object field by field. One function lists the fields of a config once, with their defaults
// and what they may be; a Reader or a Writer walks that list:
//
//   template <class Visitor, class C>
//   void visit(Visitor& at, C& c) {
//     at.required("width", c.width, between(1, 1 << 20));             // the object must have it
//     at.field("eps", c.eps, at_least(0), 1e-8);                      // else the last argument, or what c holds, stays
//     at.field("inner", [&](auto& inner) { inner.field("on", c.on); });
//   }
//
// Every error is exit 2 and names the file or the --set argument, the path of the key, the value and what is allowed.
#pragma once
#include <array>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/error.h"

namespace rownorm::fields {

using Json = nlohmann::ordered_json;

// ---- What a value may be ----

inline constexpr double infinity = std::numeric_limits<double>::infinity();
inline constexpr std::int64_t largest_integer = 9007199254740991;  // 2^53 - 1: a double tells all up to here apart

// An interval: the check and the words for it.
struct Range {
  double low = -infinity, high = infinity;
  bool open_low = false, open_high = false;

  bool holds(double x) const { return (open_low ? x > low : x >= low) && (open_high ? x < high : x <= high); }
  std::string str() const {
    if (high == infinity) return fmt::format("{} {}", open_low ? ">" : ">=", low);
    return fmt::format("in {}{}, {}{}", open_low ? '(' : '[', low, high, open_high ? ')' : ']');
  }
};
constexpr Range at_least(double low) { return {.low = low}; }
constexpr Range above(double low) { return {.low = low, .open_low = true}; }
constexpr Range between(double low, double high) { return {.low = low, .high = high}; }
inline constexpr Range below_one{.low = 0, .high = 1, .open_high = true};

// Words: an enumeration's names in the order of its values, or the values of a string.
using Words = std::initializer_list<const char*>;

// ---- Text ----

// JSON with // and /* */ comments. Broken syntax is reported with line and column, duplicate keys and numbers that no
// double holds with their path.
Json parse_text(const std::string& text, const std::string& where);

// Where values came from, so that a message can blame the file or the --set that the user has to change.
struct Source {
  std::string file;
  std::vector<std::pair<std::string, std::string>> overrides;  // path, "--set path=value"

  const std::string& of(std::string_view path) const;

  template <class... Args>
  [[noreturn]] void reject(const std::string& path, fmt::format_string<Args...> format, Args&&... args) const {
    fail(Exit::usage, "[config] {}: {}: {}", of(path), path, fmt::format(format, std::forward<Args>(args)...));
  }
};

// Sets what a "path=value" argument says, creating objects on the way, and returns the path; whether there is such a
// key and what it may be is for the Reader to say. The value is JSON (without comments) or, if it is not, a string.
std::string apply_override(Json& root, const std::string& argument, Source& source);

std::string shown(const Json& value);  // one short printable line, whatever is in it
std::string join(const std::string& path, const std::string& key);

// ---- The two visitors ----

class Reader {
 public:
  // `missing` receives the first required key that is absent; the caller reports it after finish(), because a misspelt
  // key is both missing and unknown, and unknown says more.
  Reader(const Json& object, std::string path, const Source& source, std::string& missing);

  template <class T, class... Allowed>
  void required(const char* key, T&& value, const Allowed&... allowed) {
    if (find(key)) return field(key, value, allowed...);
    if constexpr (std::is_enum_v<std::remove_cvref_t<T>>)  // an enumeration decides which other keys there are
      source_.reject(join(path_, key), "missing, but required");
    if (missing_.empty()) missing_ = join(path_, key);
    keys_.push_back(key);
  }

  template <class T, class... Allowed>
  void field(const char* key, T&& value, const Allowed&... allowed) {
    keys_.push_back(key);
    const Json* json = find(key);
    if constexpr (std::is_invocable_v<T, Reader&>) {
      if (!json) return;
      Reader child(*json, join(path_, key), source_, missing_);
      value(child);
      child.finish();
    } else {
      read_or_default(json, join(path_, key), value, allowed...);
    }
  }

  // At most one of the two keys; required_either: exactly one.
  template <class A, class B>
  void either(const char* key_a, A& a, Range allowed_a, const char* key_b, B& b, Range allowed_b) {
    if (find(key_a) && find(key_b))
      source_.reject(join(path_, key_b), "given together with {}, must be only one of them", key_a);
    for (const char* key : {key_a, key_b}) keys_.push_back(key);
    if (const Json* json = find(key_a)) read(*json, join(path_, key_a), a.emplace(), allowed_a);
    if (const Json* json = find(key_b)) read(*json, join(path_, key_b), b.emplace(), allowed_b);
  }
  template <class A, class B>
  void required_either(const char* key_a, A& a, Range allowed_a, const char* key_b, B& b, Range allowed_b) {
    either(key_a, a, allowed_a, key_b, b, allowed_b);
    if (!a && !b && missing_.empty()) missing_ = fmt::format("{} or {}", join(path_, key_a), key_b);
  }

  void finish() const;  // rejects keys that were not visited, naming the nearest that was

 private:
  const Json* find(const char* key) const;
  [[noreturn]] void reject(const Json& json, const std::string& path, const std::string& allowed) const;

  template <class T, class... Allowed>
  void read_or_default(const Json* json, const std::string& path, T& value, const Allowed&... allowed) const {
    if (json) read(*json, path, value, allowed...);
  }
  void read_or_default(const Json* json, const std::string& path, double& value, Range allowed,
                       double otherwise) const {
    value = otherwise;
    if (json) read(*json, path, value, allowed);
  }

  void read(const Json& json, const std::string& path, bool& value) const;
  void read(const Json& json, const std::string& path, int& value, Range allowed) const;
  void read(const Json& json, const std::string& path, std::int64_t& value, Range allowed) const;
  void read(const Json& json, const std::string& path, std::uint64_t& value) const;
  void read(const Json& json, const std::string& path, double& value, Range allowed) const;
  void read(const Json& json, const std::string& path, std::string& value) const;
  void read(const Json& json, const std::string& path, std::string& value, Words words) const;
  void read(const Json& json, const std::string& path, std::array<double, 2>& value, Range allowed) const;
  void read(const Json& json, const std::string& path, std::vector<std::int64_t>& value, Range allowed) const;
  void read(const Json& json, const std::string& path, std::vector<std::pair<std::int64_t, std::int64_t>>& value) const;
  template <class E>
  requires std::is_enum_v<E>
  void read(const Json& json, const std::string& path, E& value, Words words) const {
    value = static_cast<E>(index_of(json, path, words));
  }
  template <class T, class... Allowed>
  void read(const Json& json, const std::string& path, std::optional<T>& value, const Allowed&... allowed) const {
    value.reset();
    if (!json.is_null()) read(json, path, value.emplace(), allowed...);
  }
  std::size_t index_of(const Json& json, const std::string& path, Words words) const;

  const Json& object_;
  std::string path_;
  const Source& source_;
  std::string& missing_;
  std::vector<std::string> keys_;  // as visited
};

class Writer {
 public:
  explicit Writer(Json& object) : object_(object = Json::object()) {}

  template <class T, class... Allowed>
  void required(const char* key, T&& value, const Allowed&... allowed) {
    field(key, value, allowed...);
  }

  template <class T, class... Allowed>
  void field(const char* key, T&& value, const Allowed&... allowed) {
    if constexpr (std::is_invocable_v<T, Writer&>) {
      Writer child(object_[key]);
      value(child);
    } else if constexpr (std::is_enum_v<std::remove_cvref_t<T>>) {
      const auto word = [&](Words words) { return words.begin()[static_cast<std::size_t>(value)]; };
      object_[key] = word(allowed...);
    } else {
      object_[key] = value;
    }
  }
  template <class T, class... Allowed>
  void field(const char* key, const std::optional<T>& value, const Allowed&...) {
    object_[key] = value ? Json(*value) : Json(nullptr);
  }

  template <class A, class B>
  void either(const char* key_a, const A& a, Range, const char* key_b, const B& b, Range) {
    if (a) object_[key_a] = *a;
    if (b) object_[key_b] = *b;
  }
  template <class... Args>
  void required_either(const Args&... args) {
    either(args...);
  }

 private:
  Json& object_;
};

}  // namespace rownorm::fields
