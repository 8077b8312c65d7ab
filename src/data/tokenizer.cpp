#include "data/tokenizer.h"

#include <utf8proc.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <queue>
#include <set>
#include <tuple>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/utf8.h"

namespace rownorm {
namespace {

using nlohmann::json;

constexpr std::int64_t most_tokens = 65536;  // shards hold uint16
const char* const end_of_text = "<|endoftext|>";

// ---- cutting text ----

enum class CharacterClass { letter, number, space, other, none };

CharacterClass class_of(char32_t code) {
  if ((code >= '\t' && code <= '\r') || code == 0x85) return CharacterClass::space;
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(code))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
      return CharacterClass::letter;
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_NO:
      return CharacterClass::number;
    case UTF8PROC_CATEGORY_ZS:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
      return CharacterClass::space;
    default:
      return CharacterClass::other;
  }
}

// Class and length of the character at the front; none at the end of the text.
std::pair<CharacterClass, std::size_t> front_class(std::string_view text) {
  if (text.empty()) return {CharacterClass::none, 0};
  const Utf8Sequence front = utf8_front(text);
  return {class_of(front.code), front.bytes};
}

// Bytes of the characters of one class at the front, and of the last of them.
std::pair<std::size_t, std::size_t> run_of(std::string_view text, CharacterClass wanted) {
  std::size_t length = 0, last = 0;
  for (;;) {
    const auto [found, bytes] = front_class(text.substr(length));
    if (found != wanted) return {length, last};
    length += bytes;
    last = bytes;
  }
}

std::size_t piece_length(std::string_view text) {
  for (const std::string_view contraction : {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"})
    if (text.starts_with(contraction)) return contraction.size();
  const std::size_t blank = text.starts_with(' ') ? 1 : 0;  // of " ?"
  const CharacterClass kind = front_class(text.substr(blank)).first;
  if (kind != CharacterClass::space && kind != CharacterClass::none)
    return blank + run_of(text.substr(blank), kind).first;
  // \s+(?!\S): all of the white space at the end of the text, else all but its last character, if that leaves any
  const auto [length, last] = run_of(text, CharacterClass::space);
  return length == text.size() || length == last ? length : length - last;
}

// ---- tokenizer.json ----

// GPT-2's printable stand-ins: 33 to 126, 161 to 172 and 174 to 255 are themselves, the other bytes in order are U+0100
// and up (bytes_to_unicode in GPT-2's encoder.py). -1 for any other character.
int byte_of(char32_t code) {
  static const std::array<std::int16_t, 0x144> table = [] {
    std::array<std::int16_t, 0x144> bytes;
    bytes.fill(-1);
    std::size_t next = 0x100;
    for (std::size_t b = 0; b < 256; ++b) {
      const bool printable = (b >= 33 && b <= 126) || (b >= 161 && b != 173);
      bytes[printable ? b : next++] = static_cast<std::int16_t>(b);
    }
    return bytes;
  }();
  return code < table.size() ? table[code] : -1;
}

// A value of the file, short enough for a message.
std::string shown(const json& value) {
  std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  if (text.size() > 60) text = text.substr(0, 57) + "...";
  return text;
}

struct Reader {
  std::string name;

  template <class... Args>
  [[noreturn]] void wrong(fmt::format_string<Args...> format, Args&&... args) const {
    fail(Exit::data, "[tokenizer] {}: {}", name, fmt::format(format, std::forward<Args>(args)...));
  }

  // The value of a key, null when it is missing.
  static const json& at(const json& object, const char* key) {
    static const json missing;
    const auto found = object.find(key);
    return found == object.end() ? missing : *found;
  }

  static bool is_empty_text(const json& value) {
    return value.is_string() && value.get_ref<const std::string&>().empty();
  }

  // An object whose "type" is `type`, or nothing at all.
  void of_type(const json& value, const char* key, const char* type) const {
    if (value.is_null()) return;
    if (!value.is_object() || at(value, "type") != type)
      wrong("{} is {}, must be {} or null", key, shown(value.is_object() ? at(value, "type") : value), type);
  }

  void flag(const json& object, const char* where, const char* key, bool wanted, bool otherwise) const {
    const json& value = at(object, key);
    if (value.is_null() ? wanted != otherwise : value != wanted)
      wrong("{}.{} is {}, must be {}", where, key, value.is_null() ? "missing" : shown(value), wanted);
  }

  // What a vocabulary entry stands for; nothing if a character of it is no byte's.
  static std::optional<std::string> bytes_of(std::string_view entry) {
    std::string bytes;
    while (!entry.empty()) {
      const Utf8Sequence front = utf8_front(entry);  // the JSON parser has checked the UTF-8
      const int byte = byte_of(front.code);
      if (byte < 0) return std::nullopt;
      bytes.push_back(static_cast<char>(byte));
      entry.remove_prefix(front.bytes);
    }
    return bytes;
  }

  std::int32_t id(const json& value, const std::string& of) const {
    if (!value.is_number_integer() || value < 0 || value >= most_tokens)
      wrong("{} has the id {}, must be a whole number from 0 to {}", of, shown(value), most_tokens - 1);
    return value.get<std::int32_t>();
  }

  // "a b", or since tokenizers 0.20 ["a", "b"].
  std::pair<std::string, std::string> merge(const json& value, std::size_t i) const {
    if (value.is_array() && value.size() == 2 && value[0].is_string() && value[1].is_string())
      return {value[0].get<std::string>(), value[1].get<std::string>()};
    if (value.is_string()) {
      const auto& text = value.get_ref<const std::string&>();
      const std::size_t blank = text.find(' ');
      if (blank != text.npos && text.find(' ', blank + 1) == text.npos)
        return {text.substr(0, blank), text.substr(blank + 1)};
    }
    wrong("merge {} is {}, must be two tokens", i, shown(value));
  }
};

}  // namespace

std::vector<std::string_view> split_for_bpe(std::string_view text) {
  std::vector<std::string_view> pieces;
  while (!text.empty()) {
    pieces.push_back(text.substr(0, piece_length(text)));
    text.remove_prefix(pieces.back().size());
  }
  return pieces;
}

Tokenizer Tokenizer::bytes() {
  Tokenizer tokenizer;
  for (int byte = 0; byte < 256; ++byte) {
    tokenizer.texts_.emplace_back(1, static_cast<char>(byte));
    tokenizer.byte_tokens_[static_cast<std::size_t>(byte)] = byte;
  }
  tokenizer.separator_ = 0;
  return tokenizer;
}

Tokenizer Tokenizer::read(const std::filesystem::path& path) { return parse(read_text("tokenizer", path), path); }

Tokenizer Tokenizer::parse(std::string_view text, const std::filesystem::path& name) {
  const Reader reader{name.string()};
  const json file = parse_json<json>(text);
  if (!file.is_object()) reader.wrong("not a JSON object (truncated?)");

  // What would change the tokens of a text, and is not done here.
  if (const json& normalizer = Reader::at(file, "normalizer"); !normalizer.is_null())
    reader.wrong("normalizer is {}, must be null", shown(normalizer));
  const json& splitter = Reader::at(file, "pre_tokenizer");
  if (splitter.is_null()) reader.wrong("pre_tokenizer is null or missing, must be ByteLevel");
  reader.of_type(splitter, "pre_tokenizer", "ByteLevel");
  reader.flag(splitter, "pre_tokenizer", "add_prefix_space", false, true);
  reader.flag(splitter, "pre_tokenizer", "use_regex", true, true);
  reader.of_type(Reader::at(file, "post_processor"), "post_processor", "ByteLevel");
  reader.of_type(Reader::at(file, "decoder"), "decoder", "ByteLevel");
  const json& model = Reader::at(file, "model");
  if (!model.is_object()) reader.wrong("model is {}, must be an object", shown(model));
  if (model.contains("type")) reader.of_type(model, "model", "BPE");
  if (const json& dropout = Reader::at(model, "dropout"); !dropout.is_null() && dropout != 0)
    reader.wrong("model.dropout is {}, must be null", shown(dropout));
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"})
    if (const json& value = Reader::at(model, key); !value.is_null() && !Reader::is_empty_text(value))
      reader.wrong("model.{} is {}, must be null", key, shown(value));
  reader.flag(model, "model", "ignore_merges", false, false);

  // Every token by its name in the file, the special ones too.
  const json &vocabulary = Reader::at(model, "vocab"), &added = Reader::at(file, "added_tokens"),
             &merges = Reader::at(model, "merges");
  if (!vocabulary.is_object()) reader.wrong("model.vocab is {}, must be an object", shown(vocabulary));
  if (!added.is_null() && !added.is_array()) reader.wrong("added_tokens is {}, must be an array", shown(added));
  if (!merges.is_array()) reader.wrong("model.merges is {}, must be an array", shown(merges));
  std::unordered_map<std::string, std::int32_t> ids;
  for (const auto& [entry, id] : vocabulary.items()) ids[entry] = reader.id(id, shown(entry));
  Tokenizer tokenizer;
  tokenizer.splits_ = true;
  std::set<std::string> special;
  for (const json& token : added) {
    const json &content = Reader::at(token, "content"), &is_special = Reader::at(token, "special");
    if (!token.is_object() || !content.is_string() || Reader::is_empty_text(content))
      reader.wrong("added_tokens holds {}, must be objects with a content", shown(token));
    if (is_special != true) reader.wrong("the added token {} is not special, must be", shown(content));
    const std::int32_t id = reader.id(Reader::at(token, "id"), shown(content));
    if (const auto [known, inserted] = ids.emplace(content.get<std::string>(), id); !inserted && known->second != id)
      reader.wrong("the added token {} has the id {}, in the vocabulary it is {}", shown(content), id, known->second);
    special.insert(content.get<std::string>());
    if (content == end_of_text) tokenizer.separator_ = id;
  }
  tokenizer.texts_.resize(ids.size());
  std::vector<bool> taken(ids.size());
  for (const auto& [entry, id] : ids) {
    const auto i = static_cast<std::size_t>(id);
    if (i >= ids.size())
      reader.wrong("{} has the id {}, but there are {} tokens: the ids have a hole", shown(entry), id, ids.size());
    if (taken[i]) reader.wrong("two tokens have the id {}", id);
    taken[i] = true;
    if (special.contains(entry)) {
      tokenizer.texts_[i] = entry;
      continue;
    }
    auto bytes = Reader::bytes_of(entry);
    if (!bytes || bytes->empty()) reader.wrong("the entry {} is not made of the byte alphabet", shown(entry));
    tokenizer.texts_[i] = *std::move(bytes);
  }

  std::vector<bool> has_token(256);
  for (const auto& [entry, id] : ids) {
    const std::string& bytes = tokenizer.texts_[static_cast<std::size_t>(id)];
    if (special.contains(entry) || bytes.size() != 1) continue;
    const auto byte = static_cast<unsigned char>(bytes[0]);
    tokenizer.byte_tokens_[byte] = id;
    has_token[byte] = true;
  }
  if (const auto missing = std::ranges::find(has_token, false); missing != has_token.end())
    reader.wrong("no token is the byte {}, there must be one for each", missing - has_token.begin());

  const auto id_of = [&](const std::string& entry, std::size_t i) {
    const auto found = ids.find(entry);
    if (found == ids.end() || special.contains(entry))
      reader.wrong("merge {} has {}, which is not in the vocabulary", i, shown(entry));
    return found->second;
  };
  for (std::size_t i = 0; i < merges.size(); ++i) {
    const auto [left, right] = reader.merge(merges[i], i);
    const std::pair pair(id_of(left, i), id_of(right, i));
    if (!tokenizer.merges_.emplace(pair, Merge{static_cast<std::int32_t>(i), id_of(left + right, i)}).second)
      reader.wrong("merge {}, {}, is there twice", i, shown(merges[i]));
  }
  return tokenizer;
}

std::size_t Tokenizer::longest() const {
  return std::ranges::max(texts_, {}, [](const std::string& text) { return text.size(); }).size();
}

std::vector<std::int32_t> Tokenizer::encode(std::string_view text) const {
  std::vector<std::int32_t> tokens;
  if (!splits_) {
    for (const char byte : text) tokens.push_back(byte_tokens_[static_cast<unsigned char>(byte)]);
    return tokens;
  }
  const std::string valid = valid_utf8(text);
  for (const std::string_view piece : split_for_bpe(valid)) encode_piece(piece, tokens);
  return tokens;
}

// A list of the piece's tokens and a queue of the pairs that a merge joins, so that a piece of n bytes takes n log n
// steps. A pair in the queue whose tokens have been joined to others since is recognised by what it would give.
void Tokenizer::encode_piece(std::string_view piece, std::vector<std::int32_t>& tokens) const {
  struct Node {
    std::int32_t token;  // -1: joined to the one before, and then in no merge
    std::size_t previous, next;
  };
  using Candidate = std::tuple<std::int32_t, std::size_t, std::int32_t>;  // rank, left node, joined token
  const std::size_t end = piece.size();
  std::vector<Node> nodes;
  for (std::size_t i = 0; i < end; ++i)
    nodes.push_back({byte_tokens_[static_cast<unsigned char>(piece[i])], i - 1, i + 1});
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> queue;
  const auto find = [&](std::size_t left) {
    const std::size_t right = nodes[left].next;
    return right == end ? merges_.end() : merges_.find({nodes[left].token, nodes[right].token});
  };
  const auto consider = [&](std::size_t left) {
    if (const auto merge = find(left); merge != merges_.end())
      queue.emplace(merge->second.rank, left, merge->second.token);
  };
  for (std::size_t i = 0; i < end; ++i) consider(i);
  while (!queue.empty()) {
    const auto [rank, left, token] = queue.top();
    queue.pop();
    if (const auto merge = find(left); merge == merges_.end() || merge->second.rank != rank) continue;
    const std::size_t right = nodes[left].next, after = nodes[right].next;
    nodes[left].token = token;
    nodes[left].next = after;
    nodes[right].token = -1;
    if (after != end) nodes[after].previous = left;
    consider(left);
    if (left != 0) consider(nodes[left].previous);
  }
  for (std::size_t i = 0; i < end; i = nodes[i].next) tokens.push_back(nodes[i].token);
}

}  // namespace rownorm
