// Every code point, and what is not UTF-8: expectations from the Unicode standard and from Python.
#include <gtest/gtest.h>

#include <cstddef>
#include <string>

#include "base/utf8.h"

namespace rownorm {
namespace {

TEST(Utf8, EveryCodePointReadsBack) {
  for (char32_t code = 0; code <= 0x10ffff; ++code) {
    std::string text;
    append_utf8(text, code);
    const bool surrogate = code >= 0xd800 && code < 0xe000;
    const Utf8Sequence front = utf8_front(text + "x");
    ASSERT_EQ(front.kind, surrogate ? Utf8Sequence::invalid : Utf8Sequence::character)
        << std::hex << static_cast<unsigned>(code);
    if (surrogate) continue;
    ASSERT_TRUE(front.code == code) << std::hex << static_cast<unsigned>(code);
    ASSERT_EQ(front.bytes, text.size());
    ASSERT_EQ(text.size(), code < 0x80 ? 1U : code < 0x800 ? 2U : code < 0x10000 ? 3U : 4U);
    for (std::size_t n = 1; n < text.size(); ++n) {  // and so does every beginning of it
      const Utf8Sequence beginning = utf8_front(text.substr(0, n));
      ASSERT_EQ(beginning.kind, Utf8Sequence::partial) << std::hex << static_cast<unsigned>(code);
      ASSERT_EQ(beginning.bytes, n);
    }
  }
}

// >>> bytes.decode(errors="replace"), U+FFFD written as ?; the first four are tables 3-8 to 3-11 of Unicode 15.
TEST(Utf8, InvalidPartsBecomeOneReplacementEach) {
  const auto expect = [](const std::string& text, const std::string& expected) {
    std::string marked;
    for (const char c : expected) marked += c == '?' ? "\xef\xbf\xbd" : std::string(1, c);
    EXPECT_EQ(valid_utf8(text), marked);
  };
  expect("\xc0\xaf\xe0\x80\xbf\xf0\x81\x82\x41", "????????A");
  expect("\xed\xa0\x80\xed\xbf\xbf\xed\xaf\x41", "????????A");
  expect("\xf4\x91\x92\x93\xff\x41\x80\xbf\x42", "?????A??B");
  expect("\xe1\x80\xe2\xf0\x91\x92\xf1\xbf\x41", "????A");
  expect("a\xf0\x9f\x98", "a?");
  expect("\xf5\x80", "??");
  expect(std::string("a\0b\xc3\xa9", 5), std::string("a\0b\xc3\xa9", 5));
  expect("", "");
}

}  // namespace
}  // namespace rownorm
