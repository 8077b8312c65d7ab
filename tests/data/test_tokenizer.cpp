// Byte-level BPE on vocabularies small enough to merge by hand. tests/cmd/test_sample.py compares with the `tokenizers`
// library on many texts.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/expect_error.h"
#include "base/utf8.h"
#include "data/tokenizer.h"

namespace rownorm {
namespace {

using nlohmann::json;
using Tokens = std::vector<std::int32_t>;
using Pieces = std::vector<std::string_view>;

// GPT-2's character for a byte, by the rule of its paper's code: the printable ones are themselves, the others are
// numbered from U+0100.
std::string letter(int byte) {
  const auto printable = [](int b) { return (b >= '!' && b <= '~') || (b >= 0xa1 && b <= 0xac) || b >= 0xae; };
  int others = 0;
  for (int b = 0; b < byte; ++b) others += printable(b) ? 0 : 1;
  std::string text;
  append_utf8(text, static_cast<char32_t>(printable(byte) ? byte : 0x100 + others));
  return text;
}

// <|endoftext|> is 0, byte b is 1 + b, and each merge adds a token from 257 on.
json tokenizer_json(const std::vector<std::pair<std::string, std::string>>& merges = {}) {
  json vocabulary = {{"<|endoftext|>", 0}}, list = json::array();
  for (int byte = 0; byte < 256; ++byte) vocabulary[letter(byte)] = 1 + byte;
  for (const auto& [left, right] : merges) {
    if (!vocabulary.contains(left + right)) {
      const std::size_t next = vocabulary.size();
      vocabulary[left + right] = next;
    }
    list.push_back(json::array({left, right}));
  }
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"added_tokens", json::array({{{"id", 0}, {"content", "<|endoftext|>"}, {"special", true}}})},
          {"normalizer", nullptr},
          {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}}},
          {"post_processor", nullptr},
          {"decoder", {{"type", "ByteLevel"}, {"add_prefix_space", true}}},
          {"model", {{"type", "BPE"}, {"dropout", nullptr}, {"vocab", vocabulary}, {"merges", list}}}};
}

Tokenizer parse(const json& file) { return Tokenizer::parse(file.dump(), "t.json"); }

std::string decode(const Tokenizer& tokenizer, const Tokens& tokens) {
  std::string text;
  for (const std::int32_t token : tokens) text += tokenizer.text_of(token);
  return text;
}

TEST(Tokenizer, Bytes) {
  const Tokenizer bytes = Tokenizer::bytes();
  EXPECT_EQ(bytes.size(), 256);
  EXPECT_EQ(bytes.separator(), 0);
  EXPECT_EQ(bytes.encode(std::string("a\0\xff \xc3", 5)), (Tokens{97, 0, 255, 32, 195}));
  EXPECT_EQ(bytes.text_of(255), "\xff");
  EXPECT_EQ(bytes.encode(""), Tokens{});
}

TEST(Tokenizer, EveryByteThroughItsLetter) {
  const Tokenizer tokenizer = parse(tokenizer_json());
  EXPECT_EQ(tokenizer.size(), 257);
  EXPECT_EQ(tokenizer.separator(), 0);
  for (int byte = 0; byte < 256; ++byte)
    EXPECT_EQ(tokenizer.text_of(1 + byte), std::string(1, static_cast<char>(byte))) << byte;
  EXPECT_EQ(tokenizer.text_of(0), "<|endoftext|>");
  EXPECT_EQ(tokenizer.encode(std::string("\0z", 2)), (Tokens{1, 1 + 'z'}));
  // U+FFFD is ef bf bd
  EXPECT_EQ(tokenizer.encode("a\xff"), (Tokens{1 + 'a', 1 + 0xef, 1 + 0xbf, 1 + 0xbd}));
}

TEST(Tokenizer, SplitsAsGpt2) {
  EXPECT_EQ(split_for_bpe("Hello world"), (Pieces{"Hello", " world"}));
  EXPECT_EQ(split_for_bpe("it's we'll I'd 'tis you're I've I'm can't IT'S"),
            (Pieces{"it", "'s", " we", "'ll", " I", "'d", " '", "tis", " you", "'re", " I", "'ve", " I", "'m", " can",
                    "'t", " IT", "'", "S"}));
  EXPECT_EQ(split_for_bpe("'tis"), (Pieces{"'t", "is"}));
  EXPECT_EQ(split_for_bpe("a1b 22 c3"), (Pieces{"a", "1", "b", " 22", " c", "3"}));
  EXPECT_EQ(split_for_bpe("x   y"), (Pieces{"x", "  ", " y"}));
  EXPECT_EQ(split_for_bpe("x \n\n  y  "), (Pieces{"x", " \n\n ", " y", "  "}));
  EXPECT_EQ(split_for_bpe("x\ty\n"), (Pieces{"x", "\t", "y", "\n"}));
  EXPECT_EQ(split_for_bpe("x\n\ty"), (Pieces{"x", "\n", "\t", "y"}));
  EXPECT_EQ(split_for_bpe("f(x) == [1, 2];"), (Pieces{"f", "(", "x", ")", " ==", " [", "1", ",", " 2", "];"}));
  EXPECT_EQ(split_for_bpe("naïve Ωмега 漢字٣½Ⅷ"), (Pieces{"naïve", " Ωмега", " 漢字", "٣½Ⅷ"}));
  EXPECT_EQ(split_for_bpe("a\u00a0\u00a0b"), (Pieces{"a", "\u00a0", "\u00a0", "b"}));
  EXPECT_EQ(split_for_bpe("a\u3000 b"), (Pieces{"a", "\u3000", " b"}));
  EXPECT_EQ(split_for_bpe("e\u0301!"), (Pieces{"e", "\u0301!"}));  // a combining mark is neither letter nor number
  EXPECT_EQ(split_for_bpe("hi 👋🏽ok"), (Pieces{"hi", " 👋🏽", "ok"}));
  EXPECT_EQ(split_for_bpe(""), Pieces{});
}

TEST(Tokenizer, MergesByRankAndFromTheLeft) {
  const auto encoded = [](const std::vector<std::pair<std::string, std::string>>& merges, const std::string& text) {
    const Tokenizer tokenizer = parse(tokenizer_json(merges));
    const Tokens tokens = tokenizer.encode(text);
    EXPECT_EQ(decode(tokenizer, tokens), text);
    std::vector<std::string> pieces;
    for (const std::int32_t token : tokens) pieces.push_back(tokenizer.text_of(token));
    return pieces;
  };
  using Strings = std::vector<std::string>;
  EXPECT_EQ(encoded({{"b", "c"}, {"a", "b"}}, "abc"), (Strings{"a", "bc"}));
  EXPECT_EQ(encoded({{"a", "b"}, {"b", "c"}}, "abc"), (Strings{"ab", "c"}));
  EXPECT_EQ(encoded({{"a", "a"}}, "aaaaa"), (Strings{"aa", "aa", "a"}));
  EXPECT_EQ(encoded({{"a", "a"}, {"aa", "a"}}, "aaa"), (Strings{"aaa"}));
  EXPECT_EQ(encoded({{"a", "a"}, {"aa", "aa"}}, "aaaaaaa"), (Strings{"aaaa", "aa", "a"}));
  // A later merge makes a pair of an earlier rank: it is next.
  EXPECT_EQ(encoded({{"ab", "c"}, {"c", "d"}, {"a", "b"}}, "abcd"), (Strings{"ab", "cd"}));
  EXPECT_EQ(encoded({{"ab", "c"}, {"a", "b"}, {"c", "d"}}, "abcd"), (Strings{"abc", "d"}));
  // Not across pieces; a blank is Ġ in the file.
  EXPECT_EQ(encoded({{"a", letter(' ')}, {letter(' '), "b"}}, "a b"), (Strings{"a", " b"}));
  // Not what is spelt as the special token.
  EXPECT_EQ(encoded({}, "<|endoftext|>").size(), 13U);
}

TEST(Tokenizer, MergesAsTextToo) {
  json file = tokenizer_json({{"a", "b"}});
  file["model"]["merges"] = {"a b"};
  file["model"].erase("type");                       // as in GPT-2's own file
  file["pre_tokenizer"].erase("use_regex");          // the library's default is true
  file["post_processor"] = {{"type", "ByteLevel"}};  // changes offsets only
  EXPECT_EQ(parse(file).encode("ab"), Tokens{257});
}

TEST(Tokenizer, LongPiecesTakeNoLongTime) {
  const Tokenizer tokenizer = parse(tokenizer_json({{"a", "a"}, {"aa", "aa"}, {"aaaa", "aaaa"}}));
  EXPECT_EQ(tokenizer.encode(std::string(1 << 20, 'a')).size(), std::size_t{1 << 17});
}

TEST(Tokenizer, WhatIsRefused) {
  const json good = tokenizer_json({{"a", "b"}});
  EXPECT_NO_THROW(parse(good));
  const auto refused = [&](const std::string& path, const json& value, const std::string& part) {
    json file = good;
    file[json::json_pointer(path)] = value;
    expect_error(Exit::data, part, [&] { parse(file); });
  };
  refused("/normalizer", {{"type", "NFC"}}, "[tokenizer] t.json: normalizer is {\"type\":\"NFC\"}, must be null");
  refused("/pre_tokenizer", nullptr, "pre_tokenizer is null or missing, must be ByteLevel");
  refused("/pre_tokenizer/type", "Whitespace", "pre_tokenizer is \"Whitespace\", must be ByteLevel");
  refused("/pre_tokenizer/add_prefix_space", true, "pre_tokenizer.add_prefix_space is true, must be false");
  refused("/pre_tokenizer/use_regex", false, "pre_tokenizer.use_regex is false, must be true");
  refused("/post_processor", {{"type", "TemplateProcessing"}}, "post_processor is \"TemplateProcessing\"");
  refused("/decoder", "WordPiece", "decoder is \"WordPiece\"");
  refused("/model", 3, "model is 3, must be an object");
  refused("/model/type", "Unigram", "model is \"Unigram\", must be BPE");
  refused("/model/dropout", 0.1, "model.dropout is 0.1, must be null");
  refused("/model/end_of_word_suffix", "</w>", "model.end_of_word_suffix is \"</w>\"");
  refused("/model/continuing_subword_prefix", "##", "model.continuing_subword_prefix");
  refused("/model/ignore_merges", true, "model.ignore_merges is true, must be false");
  refused("/model/vocab", json::array(), "model.vocab is [], must be an object");
  refused("/model/merges", "a b", "model.merges is \"a b\", must be an array");
  refused("/model/vocab/q", -1, "\"q\" has the id -1, must be a whole number from 0 to 65535");
  refused("/model/vocab/q", 1.5, "\"q\" has the id 1.5");
  refused("/model/vocab/q", "1", "\"q\" has the id \"1\"");
  refused("/model/vocab/q", 65536, "\"q\" has the id 65536");
  refused("/model/vocab/q", 1e300, "\"q\" has the id 1e+300");
  refused("/model/vocab/q", 9000, "\"q\" has the id 9000, but there are 258 tokens: the ids have a hole");
  refused("/model/vocab/q", 5, "two tokens have the id 5");
  refused("/model/vocab/q q", 258, "the entry \"q q\" is not made of the byte alphabet");
  refused("/model/vocab/", 258, "the entry \"\" is not made of the byte alphabet");
  refused("/model/merges/0", json::array({"a"}), "merge 0 is [\"a\"], must be two tokens");
  refused("/model/merges/0", "a b c", "merge 0 is \"a b c\", must be two tokens");
  refused("/model/merges/0", 7, "merge 0 is 7, must be two tokens");
  refused("/model/merges/0", json::array({"a", "zz"}), "merge 0 has \"zz\", which is not in the vocabulary");
  refused("/model/merges/0", json::array({"a", "c"}), "merge 0 has \"ac\", which is not in the vocabulary");
  refused("/model/merges/1", "a b", "merge 1, \"a b\", is there twice");
  refused("/added_tokens", 1, "added_tokens is 1, must be an array");
  refused("/added_tokens/0", 1, "added_tokens holds 1, must be objects with a content");
  refused("/added_tokens/0/content", "", "must be objects with a content");
  refused("/added_tokens/0/special", false, "the added token \"<|endoftext|>\" is not special, must be");
  refused("/added_tokens/0/id", 4, "the added token \"<|endoftext|>\" has the id 4, in the vocabulary it is 0");
  json file = good;
  file["model"]["vocab"].erase("q");
  file["model"]["vocab"]["qq"] = 1 + 'q';
  expect_error(Exit::data, "no token is the byte 113, there must be one for each", [&] { parse(file); });
  for (const char* text : {"", "[]", "null", "{", "{\"model\":"})
    expect_error(Exit::data, "[tokenizer] t.json: not a JSON object (truncated?)",
                 [&] { Tokenizer::parse(text, "t.json"); });
  expect_error(Exit::data, "[tokenizer] no/such.json: no such file", [] { Tokenizer::read("no/such.json"); });
}

}  // namespace
}  // namespace rownorm
