// Feeds a reader its corpus and mutations of it, the same ones at every run: 10^4 by default, 10^5 with ROWNORM_FULL=1.
// Of the corpus, files named valid-* must be read and refused-* must be refused.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string_view>
#include <vector>

#include "base/allocations.h"
#include "reader.h"

namespace rownorm::fuzz {
namespace {

struct Seed {
  std::string name, text;
};

std::vector<Seed> read_corpus(const std::filesystem::path& folder) {
  std::vector<Seed> seeds;
  for (const auto& file : std::filesystem::directory_iterator(folder)) {
    std::ifstream stream(file.path(), std::ios::binary);
    seeds.push_back({file.path().filename().string(), {std::istreambuf_iterator<char>(stream), {}}});
  }
  std::ranges::sort(seeds, {}, &Seed::name);  // a folder has no order of its own
  return seeds;
}

// Whether the reader takes the input; allocations are bounded by its size.
bool try_input(const std::string& text) {
  const auto bytes = std::as_bytes(std::span(text));
  const std::vector<std::byte> exact(bytes.begin(), bytes.end());  // a sanitizer sees a read past either end
  largest_allocation = 0;
  const bool accepted = accepts(exact);
  // Parsed JSON takes more than its text; FileWriter and streams have buffers of their own.
  require(largest_allocation <= 64 * text.size() + 100'000, "a large allocation");
  return accepted;
}

// What readers stumble over: the ends of every integer type, numbers that are none or no finite one, structure,
// broken UTF-8, a zero byte.
const std::string telling[] = {"0",
                               "1",
                               "2",
                               "-1",
                               "-0",
                               "-0.0",
                               "0.5",
                               "8.0",
                               "1e3",
                               "1e300",
                               "1e-400",
                               "1e999",
                               "-1e999",
                               "65535",
                               "65536",
                               "1048576",
                               "2147483647",
                               "2147483648",
                               "4294967296",
                               "4611686018427387904",
                               "9007199254740993",
                               "9223372036854775807",
                               "9223372036854775808",
                               "18446744073709551615",
                               "18446744073709551616",
                               "99999999999999999999999",
                               "NaN",
                               "null",
                               "true",
                               "\"\"",
                               "\"x\"",
                               "[]",
                               "{}",
                               "[[0,3],[2,9]]",
                               "[",
                               "]",
                               "{\"a\":",
                               "}",
                               ",",
                               ":",
                               "//",
                               "/*",
                               "*/",
                               "\n",
                               "\\u0000",
                               "\\ud800",
                               "\xff",
                               "\xc0\xaf",
                               "\xed\xa0\x80",
                               "\xf4\x90\x80\x80",
                               std::string(1, '\0')};

struct Mutator {
  const std::vector<Seed>& seeds;
  std::mt19937_64 random{20240520};

  std::size_t below(std::size_t n) { return n == 0 ? 0 : static_cast<std::size_t>(random() % n); }
  template <class List>
  const auto& any(const List& list) {
    return list[below(std::size(list))];
  }

  struct Extent {
    std::size_t begin = 0, size = 0;
  };
  static std::vector<Extent> numbers(const std::string& text) {
    std::vector<Extent> found;
    for (std::size_t i = 0; i < text.size(); ++i) {
      if (text[i] < '0' || text[i] > '9') continue;
      const std::size_t end = std::min(text.find_first_not_of("0123456789.eE+-", i), text.size());
      found.push_back({i, end - i});
      i = end;
    }
    return found;
  }
  // "key": value pairs without structure inside, up to the comma or bracket behind them.
  static std::vector<Extent> members(const std::string& text) {
    std::vector<Extent> found;
    for (std::size_t colon = text.find("\":"); colon != text.npos; colon = text.find("\":", colon + 1)) {
      const std::size_t begin = colon == 0 ? text.npos : text.rfind('"', colon - 1);
      const std::size_t end = text.find_first_of(",}\n", colon);
      if (begin != text.npos && end != text.npos) found.push_back({begin, end - begin});
    }
    return found;
  }

  // Another number of the text, its neighbour, or an end of a type: offsets overlap or gap, products overflow.
  void edit_number(std::string& text) {
    const auto all = numbers(text);
    if (all.empty()) return;
    const Extent at = any(all), other = any(all);
    std::string number = text.substr(other.begin, other.size);
    switch (below(3)) {
      case 0:
        number = any(telling);
        break;
      case 1:
        number = std::to_string(std::strtoull(number.c_str(), nullptr, 10) + below(3) - 1);
        break;
    }
    text.replace(at.begin, at.size, number);
  }

  // A member lost, there twice, elsewhere, or with another value.
  void edit_member(std::string& text) {
    const auto all = members(text);
    if (all.empty()) return;
    const Extent at = any(all), other = any(all);
    const std::string member = text.substr(at.begin, at.size);
    switch (below(4)) {
      case 0:
        text.erase(at.begin, at.size + below(2));
        break;
      case 1:
        text.insert(other.begin, member + ",");
        break;
      case 2:
        text.replace(other.begin, other.size, member);
        break;
      case 3:
        text.replace(at.begin, at.size, member.substr(0, member.find(':') + 1) + any(telling));
        break;
    }
  }

  // Open brackets in the place of a value, few or many, closed or not.
  void nest(std::string& text) {
    const std::size_t depth = below(20) == 0 ? 20'000 : 1 + below(70);
    const bool list = below(2) == 0;
    std::string tower;
    for (std::size_t i = 0; i < depth; ++i) tower += list ? "[" : "{\"a\":";
    if (below(4) != 0) tower.append("1").append(depth, list ? ']' : '}');
    const std::size_t colon = text.find(':', below(text.size() + 1)), end = text.find_first_of(",}\n", colon);
    if (end == text.npos)
      text.insert(below(text.size() + 1), tower);
    else
      text.replace(colon + 1, end - colon - 1, tower);
  }

  // A little-endian integer: the first words, where the binary formats have their lengths, half of the time.
  void edit_word(std::string& text) {
    static const std::int64_t words[] = {0,         1,       -1,        2,           8,         1024,     INT32_MAX,
                                         INT32_MIN, 1 << 30, 1LL << 32, 100'000'001, INT64_MAX, INT64_MIN};
    const std::size_t size = 2u << below(3);
    if (text.size() < size) return;
    const std::size_t last = text.size() / size - 1,
                      word = below(2) == 0 ? below(std::min<std::size_t>(last, 3) + 1) : below(last + 1);
    const std::int64_t value = below(3) == 0 ? static_cast<std::int64_t>(text.size() - below(16)) : any(words);
    std::memcpy(text.data() + word * size, &value, size);
  }

  void mutate(std::string& text) {
    const std::size_t at = below(text.size() + 1);
    switch (below(12)) {
      case 0:
        if (at < text.size()) text[at] = static_cast<char>(text[at] ^ (1 << below(8)));
        break;
      case 1:
        if (at < text.size()) text[at] = static_cast<char>(below(256));
        break;
      case 2:
        text.resize(at);
        break;
      case 3:
        text.resize(text.size() + below(9));
        break;
      case 4:
        text.erase(at, 1 + below(20));
        break;
      case 5:
        text.insert(at, any(telling));
        break;
      case 6: {  // a part again
        const std::string part = text.substr(below(text.size() + 1), below(60));
        text.insert(at, part);
        break;
      }
      case 7: {  // spliced
        const std::string& other = any(seeds).text;
        text = text.substr(0, at) + other.substr(below(other.size() + 1));
        break;
      }
      case 8:
        edit_word(text);
        break;
      case 9:
        nest(text);
        break;
      case 10:
        edit_member(text);
        break;
      default:
        edit_number(text);
    }
  }
};

int run(const std::filesystem::path& folder) {
  const std::vector<Seed> seeds = read_corpus(folder);
  std::string text;
  try {
    for (const Seed& seed : seeds) {
      text = seed.text;
      const bool accepted = try_input(text);
      if (!seed.name.starts_with(accepted ? "valid-" : "refused-"))
        throw std::logic_error(seed.name + (accepted ? ": is read" : ": is refused"));
    }
    const char* full = std::getenv("ROWNORM_FULL");
    const int count = full && std::string_view(full) == "1" ? 100'000 : 10'000;
    std::vector<Seed> valid_seeds = seeds;
    std::erase_if(valid_seeds, [](const Seed& seed) { return !seed.name.starts_with("valid-"); });
    Mutator mutator{seeds};
    int valid = 0, refused = 0;
    for (int i = 0; i < count; ++i) {
      text = mutator.any(mutator.below(4) == 0 ? seeds : valid_seeds).text;
      for (std::size_t n = 1 + mutator.below(2); n > 0; --n) mutator.mutate(text);
      if (mutator.below(4) != 0) text = repaired(text);
      ++(try_input(text) ? valid : refused);
    }
    std::printf("%zu seeds, %d mutations: %d read, %d refused\n", seeds.size(), count, valid, refused);
    text.clear();
    require(valid > count / 100 && refused > count / 5, "too few are read, or refused, for this to mean something");
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    std::ofstream("failed-input", std::ios::binary) << text;
    std::fprintf(stderr, "the input: %s\n", std::filesystem::absolute("failed-input").c_str());
    return 1;
  }
}

}  // namespace
}  // namespace rownorm::fuzz

int main(int count, char** arguments) {
  if (count == 2) return rownorm::fuzz::run(arguments[1]);
  std::fprintf(stderr, "usage: seeded_<reader> CORPUS\n");
  return 2;
}
