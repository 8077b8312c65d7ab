#include "base/utf8.h"

namespace rownorm {

Utf8Sequence utf8_front(std::string_view text) {
  const auto byte = [text](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  if (first < 0x80) return {Utf8Sequence::character, 1, first};
  if (first < 0xc2 || first > 0xf4) return {Utf8Sequence::invalid, 1, 0};
  const std::size_t length = first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
  char32_t code = first & (0x7fU >> length);
  for (std::size_t i = 1; i < length; ++i) {
    if (i == text.size()) return {Utf8Sequence::partial, i, 0};
    unsigned char low = 0x80, high = 0xbf;
    if (i == 1 && first == 0xe0) low = 0xa0;   // else overlong
    if (i == 1 && first == 0xed) high = 0x9f;  // else a surrogate
    if (i == 1 && first == 0xf0) low = 0x90;   // else overlong
    if (i == 1 && first == 0xf4) high = 0x8f;  // else past U+10FFFF
    if (byte(i) < low || byte(i) > high) return {Utf8Sequence::invalid, i, 0};
    code = code << 6 | (byte(i) & 0x3fU);
  }
  return {Utf8Sequence::character, length, code};
}

std::string valid_utf8(std::string_view text) {
  std::string valid;
  valid.reserve(text.size());
  while (!text.empty()) {
    const Utf8Sequence front = utf8_front(text);
    if (front.kind == Utf8Sequence::character)
      valid.append(text.substr(0, front.bytes));
    else
      append_utf8(valid, 0xfffd);
    text.remove_prefix(front.bytes);
  }
  return valid;
}

void append_utf8(std::string& text, char32_t code) {
  const auto add = [&](char32_t byte) { text.push_back(static_cast<char>(byte)); };
  const auto rest = [&](int shift) { add(0x80 | (code >> shift & 0x3f)); };
  if (code < 0x80) {
    add(code);
  } else if (code < 0x800) {
    add(0xc0 | code >> 6);
    rest(0);
  } else if (code < 0x10000) {
    add(0xe0 | code >> 12);
    rest(6);
    rest(0);
  } else {
    add(0xf0 | code >> 18);
    rest(12);
    rest(6);
    rest(0);
  }
}

}  // namespace rownorm
