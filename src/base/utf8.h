// UTF-8, one sequence at a time.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

namespace rownorm {

struct Utf8Sequence {
  enum Kind {
    character,  // a whole sequence: `code` is its code point
    partial,    // the text ends inside of a sequence that is right so far
    invalid,    // not UTF-8: the longest beginning of a right sequence, or one byte
  };
  Kind kind;
  std::size_t bytes;  // from the front of the text, at least 1
  char32_t code;
};

// The sequence at the front of `text`, which is not empty. No surrogates, no overlong forms, nothing past U+10FFFF
// (Unicode 15, table 3-7).
Utf8Sequence utf8_front(std::string_view text);

// The text with U+FFFD in place of each invalid part, as in Python's bytes.decode(errors="replace").
std::string valid_utf8(std::string_view text);

void append_utf8(std::string& text, char32_t code);

}  // namespace rownorm
