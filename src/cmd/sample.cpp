// rownorm sample: text from a checkpoint's model, token by token with a key-value cache.
#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string_view>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/random.h"
#include "base/utf8.h"
#include "cmd/commands.h"
#include "data/tokenizer.h"
#include "model/sampling.h"
#include "ops/open.h"
#include "train/log.h"
#include "train/run_directory.h"
#include "train/trained_model.h"

namespace rownorm {
namespace {

namespace fs = std::filesystem;
using Tokens = std::vector<std::int32_t>;

void check(const SampleOptions& o) {
  check_device_and_precision(o.device, o.precision);
  const Sampling& s = o.sampling;
  if (!(s.temperature >= 0) || std::isinf(s.temperature))
    fail(Exit::usage, "[sample] --temperature {}: must be at least 0 and finite", s.temperature);
  if (!(s.top_p > 0 && s.top_p <= 1))
    fail(Exit::usage, "[sample] --top-p {}: must be more than 0 and at most 1", s.top_p);
  if (int{o.prompt.has_value()} + int{o.prompt_file.has_value()} + int{o.prompt_tokens.has_value()} > 1)
    fail(Exit::usage, "[sample] --prompt, --prompt-file and --prompt-tokens: give one of them");
}

fs::path find_tokenizer(const Config& config) {
  const std::vector<fs::path> found = tokenizers_beside_data(config);
  if (found.empty())
    fail(Exit::usage,
         "[sample] --tokenizer: the model has {} tokens and there is no tokenizer.json beside {}; give a FILE, or none "
         "for token ids",
         config.model.vocab_size, config.data.train);
  if (found.size() > 1)
    fail(Exit::usage, "[sample] --tokenizer: there are {} and {}; give one of them", found[0].string(),
         found[1].string());
  return found[0];
}

// None: token ids are shown.
std::optional<Tokenizer> choose_tokenizer(const std::string& option, const Config& config) {
  const std::int64_t vocab = config.model.vocab_size;
  if (option == "none") return std::nullopt;
  if (option == "bytes" || (option == "auto" && vocab == 256)) {
    if (vocab != 256) fail(Exit::usage, "[sample] --tokenizer bytes: has 256 tokens, model.vocab_size is {}", vocab);
    return Tokenizer::bytes();
  }
  const fs::path path = option == "auto" ? find_tokenizer(config) : fs::path(option);
  Tokenizer tokenizer = Tokenizer::read(path);
  if (tokenizer.size() != vocab)
    fail(Exit::data, "[sample] {}: has {} tokens, model.vocab_size is {}: not this model's (--tokenizer FILE or none)",
         path.string(), tokenizer.size(), vocab);
  if (option == "auto") log_line(fmt::format("tokenizer: {}, beside the run's data", path.string()));
  return tokenizer;
}

// At most `most` bytes and one more, of a file ("-": standard input) that may be endless.
std::string read_prompt_file(const std::string& path, std::size_t most) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> opened(path == "-" ? nullptr : std::fopen(path.c_str(), "rbe"),
                                                               [](std::FILE* f) { return f ? std::fclose(f) : 0; });
  if (path != "-" && !fs::exists(path)) fail(Exit::data, "[prompt] {}: no such file", path);
  if (path != "-" && fs::is_directory(path)) fail(Exit::data, "[prompt] {}: is a folder, expected a file", path);
  std::FILE* file = path == "-" ? stdin : opened.get();
  std::string text(most + 1, '\0');
  if (file) text.resize(std::fread(text.data(), 1, text.size(), file));
  if (!file || std::ferror(file))
    fail(Exit::data, "[prompt] {}: {}", path == "-" ? "standard input" : path, std::strerror(errno));
  return text;
}

std::int32_t parse_token(const char* option, std::string_view text, std::int64_t vocab) {
  std::int32_t token = -1;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), token);
  if (error != std::errc() || stop != text.data() + text.size() || token < 0 || token >= vocab)
    fail(Exit::usage, "[sample] {}: \"{}\" is not a token, must be from 0 to {}", option, text, vocab - 1);
  return token;
}

Tokens read_prompt(const SampleOptions& options, const std::optional<Tokenizer>& tokenizer, const ModelConfig& model) {
  Tokens tokens;
  if (options.prompt_tokens) {
    for (std::string_view rest = *options.prompt_tokens;;) {
      const std::size_t comma = rest.find(',');
      tokens.push_back(parse_token("--prompt-tokens", rest.substr(0, comma), model.vocab_size));
      if (comma == rest.npos) return tokens;
      rest.remove_prefix(comma + 1);
    }
  }
  if (!tokenizer) fail(Exit::usage, "[sample] --tokenizer none: needs --prompt-tokens");
  const auto most = static_cast<std::size_t>(model.context) * tokenizer->longest();
  const std::string text =
      options.prompt_file ? read_prompt_file(*options.prompt_file, most) : options.prompt.value_or("");
  if (text.size() > most)
    fail(Exit::usage, "[sample] the prompt has more than {} bytes, which no {} tokens hold: the model's context", most,
         model.context);
  tokens = tokenizer->encode(text);
  if (tokens.empty()) {  // as a document begins
    if (!tokenizer->separator()) fail(Exit::usage, "[sample] the prompt is empty and the tokenizer has no separator");
    tokens.push_back(*tokenizer->separator());
  }
  return tokens;
}

void print(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0)
    fail(Exit::data, "[output] standard output: {}", std::strerror(errno));
}

// Prints text as it comes, but no part of a UTF-8 sequence before the rest of it; what is not UTF-8, as it is.
class TextPrinter {
 public:
  void add(std::string_view text) {
    pending_ += text;
    std::size_t whole = 0;
    while (whole < pending_.size()) {
      const Utf8Sequence front = utf8_front(std::string_view(pending_).substr(whole));
      if (front.kind == Utf8Sequence::partial) break;
      whole += front.bytes;
    }
    print(std::string_view(pending_).substr(0, whole));
    pending_.erase(0, whole);
  }
  void finish() { print(std::exchange(pending_, "") + "\n"); }

 private:
  std::string pending_;
};

// The network with the cache of one sequence.
class Generator {
 public:
  Generator(const TrainedModel& model, const SampleOptions& options)
      : name_(model.name()),
        config_(model.config.model),
        loaded_(load_model(model, options.device, options.precision, 1, [&](Arena& arena, const Backend& be) {
          cache_ = make_cache(arena, config_, be.compute_dtype());
          logits_ = arena.add("step", be.compute_dtype(), {1, config_.vocab_size});
          wide_logits_ = arena.add("step", DType::f64, {1, config_.vocab_size});
        })) {}

  std::string device() const { return loaded_.be->description(); }

  // Logits of what follows `tokens`, which follow the `position` tokens before. Error (exit 4) if one is not finite.
  std::vector<double> logits_after(std::span<const std::int32_t> tokens, std::int64_t position) {
    Backend& be = *loaded_.be;
    const std::int64_t n = std::ssize(tokens);
    Activations a = first_rows(loaded_.activations, n);
    be.upload(a.tokens, tokens.data());
    extend(be, config_, loaded_.weights, a, cache_, position);
    be.linear(logits_, a.hidden.rows(n - 1, n), loaded_.weights.head);
    be.copy(wide_logits_, logits_);
    std::vector<double> logits(static_cast<std::size_t>(config_.vocab_size));
    be.download(logits.data(), wide_logits_);
    if (!std::ranges::all_of(logits, [](double z) { return std::isfinite(z); }))
      fail(Exit::numbers, "[sample] {}: a logit after position {} is not finite", name_, position + n - 1);
    return logits;
  }

 private:
  std::string name_;
  ModelConfig config_;
  KeyValueCache cache_;
  Tensor logits_, wide_logits_;
  LoadedModel loaded_;  // its constructor's arena makes the tensors above
};

}  // namespace

int sample_command(const SampleOptions& options) {
  check(options);
  const TrainedModel trained = find_trained_model(options.checkpoint);
  const std::int64_t vocab = trained.config.model.vocab_size, context = trained.config.model.context;
  const std::optional<Tokenizer> tokenizer = choose_tokenizer(options.tokenizer, trained.config);
  const Tokens prompt = read_prompt(options, tokenizer, trained.config.model);
  const std::int64_t room = context - std::ssize(prompt), count = options.tokens.value_or(room);
  if (room < 1 || count > room)
    fail(Exit::usage, "[sample] a prompt of {} tokens and --tokens {}: together at most the model's context, {}",
         prompt.size(), options.tokens ? std::to_string(count) : "1 or more", context);
  std::optional<std::int32_t> stop;
  if (options.stop) stop = parse_token("--stop", *options.stop, vocab);

  Generator generator(trained, options);
  log_line(fmt::format("{}: update {}, {}; prompt tokens: {}, new ones: at most {}", trained.name(),
                       trained.checkpoint.state.at("update").dump(), generator.device(), prompt.size(), count));
  using Clock = std::chrono::steady_clock;
  const auto seconds_since = [](Clock::time_point t) {
    return std::chrono::duration<double>(Clock::now() - t).count();
  };
  const auto begin = Clock::now();
  const std::vector<double> after_prompt = generator.logits_after(prompt, 0);
  const double prompt_seconds = seconds_since(begin);

  std::int64_t steps = 0;
  double step_seconds = 0;
  for (std::int64_t sample = 0; sample < options.samples; ++sample) {
    const std::uint64_t entropy[] = {options.seed, static_cast<std::uint64_t>(sample)};
    Pcg64 random{SeedSequence(entropy)};
    std::vector<double> logits = after_prompt;  // the cache keeps the prompt; what followed it is overwritten
    Tokens tokens;
    std::string text;
    TextPrinter printer;
    bool stopped = false;
    while (std::ssize(tokens) < count) {
      // As numpy's default_rng(SeedSequence([seed, sample])).random().
      const double uniform = static_cast<double>(random.next64() >> 11) * 0x1p-53;
      const std::int32_t token = sample_token(logits, options.sampling, uniform);
      if (token == stop) {
        stopped = true;
        break;
      }
      tokens.push_back(token);
      if (options.json)
        text += tokenizer ? tokenizer->text_of(token) : "";
      else if (tokenizer)
        printer.add(tokenizer->text_of(token));
      else
        printer.add(fmt::format("{}{}", tokens.size() > 1 ? " " : "", token));
      if (std::ssize(tokens) == count) break;
      const auto step = Clock::now();
      logits = generator.logits_after({&token, 1}, std::ssize(prompt) + std::ssize(tokens) - 1);
      step_seconds += seconds_since(step);
      ++steps;
    }
    if (options.json) {
      nlohmann::ordered_json record = {{"checkpoint", trained.name()},
                                       {"update", trained.checkpoint.state.at("update")},
                                       {"seed", options.seed},
                                       {"sample", sample},
                                       {"prompt_tokens", prompt},
                                       {"tokens", tokens},
                                       {"stopped", stopped}};
      if (tokenizer) record["text"] = valid_utf8(text);
      print(json_text(record) + "\n");
    } else {
      printer.finish();
      if (sample + 1 < options.samples) print("---\n");
    }
  }
  log_line(fmt::format("prompt: {:.3g} s; {} tokens after a first one: {:.1f} tokens/s", prompt_seconds, steps,
                       steps > 0 ? static_cast<double>(steps) / step_seconds : 0));
  return static_cast<int>(Exit::ok);
}

}  // namespace rownorm
