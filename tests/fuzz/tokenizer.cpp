// tokenizer.json: a byte-level BPE, or refused. What is read encodes any text, and decodes it to the same.
#include "data/tokenizer.h"

#include "base/utf8.h"
#include "reader.h"

namespace rownorm::fuzz {

Exit refusal() { return Exit::data; }

void read(std::span<const std::byte> input) {
  const std::string file = text_of(input);
  const Tokenizer tokenizer = Tokenizer::parse(file, "m.json");
  const auto separator = tokenizer.separator();
  require(!separator || (0 <= *separator && *separator < tokenizer.size()), "separator");
  // The file itself is a text as odd as any.
  for (const std::string& text :
       {std::string("abc aab <|endoftext|> \xff\xe2\x82 caf\xc3\xa9\n\n  aaaa'll 12"), file}) {
    std::string again;
    for (const std::int32_t token : tokenizer.encode(text)) again += tokenizer.text_of(token);
    require(again == valid_utf8(text), "another text");
  }
}

std::string repaired(std::string input) { return input; }

}  // namespace rownorm::fuzz
