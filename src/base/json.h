// JSON that came from outside, and JSON as text.
#pragma once
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace rownorm {

// The document of a text; discarded (is_discarded()) if it is not JSON or is nested more than 32 deep, which nothing of
// ours is: copying and writing a document recurse. Json: ordered_json, or json where objects are large (its look-up is
// not linear).
template <class Json = nlohmann::ordered_json>
Json parse_json(std::string_view text) {
  constexpr int deepest = 32;
  struct TooDeep {};
  const auto watch = [](int depth, typename Json::parse_event_t, const Json&) {
    if (depth > deepest) throw TooDeep();
    return true;
  };
  try {
    return Json::parse(text, watch, false);
  } catch (const TooDeep&) {
    return {Json::value_t::discarded};
  }
}

// Compact or indented. A file name that is not UTF-8 is written with U+FFFD.
inline std::string json_text(const nlohmann::ordered_json& document, int indent = -1) {
  return document.dump(indent, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

// Whether a value is an integer from 0 to 2^63 - 1, as a number of updates is.
inline bool is_count(const nlohmann::ordered_json& value) {
  return value.is_number_unsigned() && value.get<std::uint64_t>() <= std::numeric_limits<std::int64_t>::max();
}

}  // namespace rownorm
