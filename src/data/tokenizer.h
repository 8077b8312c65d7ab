// Text to tokens and back: bytes, or byte-level BPE as GPT-2's (Radford et al. 2019) in the tokenizer.json of Hugging
// Face's `tokenizers`, which data/prepare.py train-bpe writes.
//
// Encoding, as by that library: the text is cut by
//   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
// and in each piece, bytes at first, the adjacent pair that comes first in the list of merges is joined, the leftmost
// of equal ones, until no pair is in the list. The classes are those of the Unicode version that libutf8proc knows; a
// character of a later version is in no class. Text is UTF-8; an invalid part counts as U+FFFD, and a special token's
// name (<|endoftext|>) as text, as in data/prepare.py.
#pragma once
#include <array>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace rownorm {

class Tokenizer {
 public:
  // 256 tokens, token = byte, any bytes are text; the separator is 0, the byte that text never holds.
  static Tokenizer bytes();

  // A tokenizer.json; `name` stands for the path in messages. Error (exit 3) for anything but a byte-level BPE, for
  // what would change its tokens and is not done here (a normalizer, a prefix space, dropout, tokens added that are not
  // special, ...), for token ids that do not run from 0 without a hole, a byte without a token, or a merge that does
  // not lead from two tokens to a third. Truncation and padding are a caller's matter and are not looked at.
  static Tokenizer parse(std::string_view json, const std::filesystem::path& name);
  static Tokenizer read(const std::filesystem::path& path);  // the same of a file

  std::int64_t size() const { return static_cast<std::int64_t>(texts_.size()); }
  std::vector<std::int32_t> encode(std::string_view text) const;
  // The bytes of a token in [0, size()), which need not be whole UTF-8 sequences.
  const std::string& text_of(std::int32_t token) const { return texts_.at(static_cast<std::size_t>(token)); }
  std::size_t longest() const;  // bytes of a token
  // The token before every document: <|endoftext|>, or byte 0. None if the file has no such special token.
  std::optional<std::int32_t> separator() const { return separator_; }

 private:
  struct Merge {
    std::int32_t rank, token;
  };
  struct HashPair {
    std::size_t operator()(std::pair<std::int32_t, std::int32_t> pair) const {
      return std::hash<std::uint64_t>()(std::uint64_t{static_cast<std::uint32_t>(pair.first)} << 32 |
                                        static_cast<std::uint32_t>(pair.second));
    }
  };
  Tokenizer() = default;
  void encode_piece(std::string_view piece, std::vector<std::int32_t>& tokens) const;

  std::vector<std::string> texts_;  // by token
  std::array<std::int32_t, 256> byte_tokens_{};
  std::unordered_map<std::pair<std::int32_t, std::int32_t>, Merge, HashPair> merges_;
  std::optional<std::int32_t> separator_;
  bool splits_ = false;  // bytes: every byte is a token, and the text is not cut
};

// The pieces into which the expression above cuts valid UTF-8; together they are the text.
std::vector<std::string_view> split_for_bpe(std::string_view text);

}  // namespace rownorm
