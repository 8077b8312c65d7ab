// How a config is read: text -> JSON -> overrides -> Config, by the one list of its keys, visit() -> check() of what no
// single key can tell. to_json() walks the same list.
#include "train/config.h"

#include <algorithm>
#include <string_view>

#include "base/file.h"
#include "train/fields.h"

namespace rownorm {

namespace {

using namespace fields;

constexpr Words algorithms{"muon", "adamw", "rownorm"};
constexpr Words recomputes{"none", "block"};
constexpr Words devices{"auto", "cpu", "cuda", "reference"};
constexpr Words newton_schulz_precisions{"fp32", "tf32", "bf16"};
constexpr Words precisions{"auto", "bf16", "tf32", "fp32", "fp64"};

// ---- The keys ----

template <class Visitor, class Optimizer>
void visit_optimizer(Visitor& at, Optimizer& o) {
  at.required("algorithm", o.algorithm, algorithms);
  at.required("lr", o.lr, at_least(0));
  switch (o.algorithm) {  // PAPER 4
    case Algorithm::muon:
      at.field("momentum", o.momentum, below_one);
      at.field("nesterov", o.nesterov);
      at.field("weight_decay", o.weight_decay, at_least(0), 0.1);
      at.field("newton_schulz_steps", o.newton_schulz_steps, between(0, 100));
      at.field("newton_schulz_precision", o.newton_schulz_precision, newton_schulz_precisions);
      at.field("eps", o.eps, at_least(0), 1e-5);
      break;
    case Algorithm::adamw:
      at.field("betas", o.betas, below_one);
      at.field("eps", o.eps, at_least(0), 1e-10);
      at.field("weight_decay", o.weight_decay, at_least(0), 0.1);
      break;
    case Algorithm::rownorm:
      at.field("beta", o.beta, below_one);
      at.field("eps", o.eps, at_least(0), 1e-8);
      at.field("weight_decay", o.weight_decay, at_least(0), 0.0);
      at.field("projected", o.projected);
      break;
  }
}

template <class Visitor, class C>  // C is Config or const Config
void visit(Visitor& top, C& c) {
  top.field("name", c.name);  // default: the last component of output
  top.field("seed", c.seed);
  top.field("device", c.device, devices);
  top.field("precision", c.precision, precisions);
  top.field("recompute", c.recompute, recomputes);
  top.required("model", [&m = c.model](auto& at) {
    at.required("vocab_size", m.vocab_size, between(1, 65536));  // tokens are uint16
    at.required("context", m.context, between(1, 1 << 20));
    at.required("layers", m.layers, between(1, 4096));
    at.required("width", m.width, between(1, 1 << 20));
    at.required("head_dim", m.head_dim, between(2, 1 << 20));
    at.field("mlp_ratio", m.mlp_ratio, between(1, 256));
    at.field("rope_base", m.rope_base, above(0));
    at.field("norm_eps", m.norm_eps, at_least(0));
    at.field("init_std", m.init_std, at_least(0));
  });
  top.required("data", [&d = c.data](auto& at) {
    at.required("train", d.train);
    at.required("validation", d.validation);
  });
  top.required("batch", [&b = c.batch](auto& at) {
    at.required("sequences", b.sequences, between(1, 1 << 24));
    at.required("micro_batch", b.micro_batch, between(1, 1 << 24));
  });
  top.required("schedule", [&s = c.schedule](auto& at) {
    at.required_either("tokens_per_parameter", s.tokens_per_parameter, above(0), "updates", s.updates, at_least(1));
    at.either("warmup_fraction", s.warmup_fraction, below_one, "warmup_updates", s.warmup_updates, at_least(0));
    at.field("min_lr_ratio", s.min_lr_ratio, between(0, 1));
    at.field("max_updates", s.max_updates, at_least(1));
  });
  top.field("clip_norm", c.clip_norm, above(0));
  top.required("optimizer", [&o = c.optimizer](auto& roles) {
    roles.required("hidden", [&](auto& at) { visit_optimizer(at, o.hidden); });
    roles.required("embedding", [&](auto& at) { visit_optimizer(at, o.embedding); });
    roles.required("head", [&](auto& at) { visit_optimizer(at, o.head); });
  });
  top.field("evaluation", [&e = c.evaluation](auto& at) {
    at.field("every", e.every, at_least(0));
    at.field("tokens", e.tokens, at_least(1));
    at.field("at_start", e.at_start);
  });
  top.field("diagnostics", [&d = c.diagnostics](auto& at) {
    at.field("diameter_every", d.diameter_every, at_least(0));
    at.field("hilbert_panel", d.hilbert_panel);
  });
  top.field("log_every", c.log_every, at_least(1));
  top.field("peak_tflops", c.peak_tflops, above(0));
  top.field("checkpoint", [&k = c.checkpoint](auto& at) {
    at.field("every", k.every, at_least(0));
    at.field("keep", k.keep, at_least(1));
    at.field("keep_updates", k.keep_updates, at_least(1));
  });
  top.field("comm", [&x = c.comm](auto& at) { at.field("timeout_seconds", x.timeout_seconds, above(0)); });
  top.field("debug", [&d = c.debug](auto& at) { at.field("compare_ranks", d.compare_ranks); });
  top.field("init_from", c.init_from);
  top.required("output", c.output);
}

// An override of one of two alternatives drops the other.
void drop_alternative(Json& json, const std::string& path) {
  for (const auto& [a, b] :
       {std::pair{"tokens_per_parameter", "updates"}, std::pair{"warmup_fraction", "warmup_updates"}}) {
    if (path == join("schedule", a)) json["schedule"].erase(b);
    if (path == join("schedule", b)) json["schedule"].erase(a);
  }
}

// Defaults that follow from other keys.
void fill_in(Config& c) {
  if (c.name.empty()) {
    const std::filesystem::path path = c.output;
    c.name = (path.has_filename() ? path : path.parent_path()).filename().string();
    if (c.name.empty()) c.name = c.output;  // "/"
  }
  auto& s = c.schedule;
  if (!s.warmup_fraction && !s.warmup_updates) s.warmup_fraction = 0.1;
  // The paper's 5,242,880 positions, or as many as whole sequences allow.
  if (c.evaluation.tokens == 0) c.evaluation.tokens = 5'242'880 / c.model.context * c.model.context;
}

// ---- What no single key can tell ----

// The divisors of n next to x, as words: "4 and 8".
std::string nearest_divisors(std::int64_t n, std::int64_t x) {
  std::int64_t lower = std::min(x, n), upper = std::min(x, n);
  while (n % lower != 0) --lower;
  while (n % upper != 0) ++upper;
  return lower == upper ? fmt::format("{} does", lower) : fmt::format("{} and {} do", lower, upper);
}

void check_batch(const Config& c, std::int64_t ranks, const Source& source) {
  const auto& b = c.batch;
  if (b.sequences % ranks != 0)
    source.reject("batch.sequences", "{}, must be a multiple of the {} ranks (micro_batch * ranks divides it)",
                  b.sequences, ranks);
  if (b.sequences / ranks % b.micro_batch != 0)
    source.reject("batch.micro_batch", "{}, but micro_batch * {} ranks must divide batch.sequences {}: {}",
                  b.micro_batch, ranks, b.sequences, nearest_divisors(b.sequences / ranks, b.micro_batch));

  // BLAS counts rows in 32 bits; then no tensor of a micro-batch, at most 2^29 values a token wide, passes 63 bits
  // either.
  if (b.micro_batch * c.model.context >= std::int64_t{1} << 31)
    source.reject("batch.micro_batch", "{} sequences of {} tokens, must be fewer than 2^31 tokens", b.micro_batch,
                  c.model.context);
}

void check_schedule(const Config& c, const Source& source) {
  const auto& s = c.schedule;
  const char* length = s.updates ? "schedule.updates" : "schedule.tokens_per_parameter";
  const double tokens = s.updates ? static_cast<double>(*s.updates) * static_cast<double>(c.tokens_per_update())
                                  : *s.tokens_per_parameter * static_cast<double>(parameter_count(c.model));
  if (tokens >= 0x1p63) source.reject(length, "{:g} training tokens, must be fewer than 2^63", tokens);
  if (c.updates() < 1)
    source.reject(length, "{:g} training tokens, must be at least one update of {}", tokens, c.tokens_per_update());
  if (c.warmup() >= c.updates())
    source.reject(s.warmup_updates ? "schedule.warmup_updates" : "schedule.warmup_fraction",
                  "{} warmup updates, must be fewer than the {} of the schedule", c.warmup(), c.updates());
}

// (With evaluation.every 0 the panel is checked, but never measured.)
void check_panel(const Config& c, const Source& source) {
  const auto& panel = c.diagnostics.hilbert_panel;
  for (std::size_t i = 0; i < panel.size(); ++i) {
    const auto [begin, end] = panel[i];
    const std::string path = "diagnostics.hilbert_panel";
    if (begin >= end || end > c.evaluation.tokens)
      source.reject(path, "range {} is [{}, {}], must be begin < end <= evaluation.tokens {}", i, begin, end,
                    c.evaluation.tokens);
    if (i > 0 && begin < panel[i - 1].second)
      source.reject(path,
                    "range {}, [{}, {}], begins before the one before it ends, at {}; must be ascending and apart", i,
                    begin, end, panel[i - 1].second);
  }
}

void check_precision(const Config& c, const Source& source) {
  const bool fits = c.precision == "auto"     ? true
                    : c.device == "reference" ? c.precision == "fp64"
                    : c.device == "cpu"       ? c.precision == "fp32"
                                              : c.precision != "fp64";
  if (!fits)
    source.reject("precision", "{} on device {}, must be fp32 on cpu, bf16, tf32 or fp32 on cuda, fp64 on reference",
                  c.precision, c.device);
}

// The roles that ask for a newton_schulz_precision that not every device has.
std::vector<std::pair<std::string, NewtonSchulzPrecision>> special_newton_schulz(const Config& c) {
  std::vector<std::pair<std::string, NewtonSchulzPrecision>> found;
  for (const auto& [role, o] :
       {std::pair{"hidden", &c.optimizer.hidden}, {"embedding", &c.optimizer.embedding}, {"head", &c.optimizer.head}})
    if (o->newton_schulz_precision != NewtonSchulzPrecision::fp32)
      found.emplace_back(fmt::format("optimizer.{}.newton_schulz_precision", role), o->newton_schulz_precision);
  return found;
}

void check_newton_schulz(const Config& c, const Source& source) {
  if (c.device == "cuda" || c.device == "auto") return;
  for (const auto& [path, precision] : special_newton_schulz(c))
    source.reject(path, "{} on device {}, must be fp32; cuda has tf32 and bf16", name_of(precision), c.device);
}

void check(const Config& c, std::int64_t ranks, const Source& source) {
  const auto& m = c.model;
  if (m.head_dim % 2 != 0) source.reject("model.head_dim", "{}, must be even (RoPE turns pairs)", m.head_dim);
  if (m.width % m.head_dim != 0)
    source.reject("model.width", "{}, must be a multiple of model.head_dim {}", m.width, m.head_dim);
  check_batch(c, ranks, source);
  check_schedule(c, source);
  if (const auto rest = c.evaluation.tokens % m.context; rest != 0)
    source.reject("evaluation.tokens", "{}, must be a multiple of model.context {}, such as {}", c.evaluation.tokens,
                  m.context, c.evaluation.tokens - rest + m.context);
  check_panel(c, source);
  check_precision(c, source);
  check_newton_schulz(c, source);
}

}  // namespace

// ---- What follows ----

std::int64_t Config::updates() const {
  if (schedule.updates) return *schedule.updates;
  const double tokens = *schedule.tokens_per_parameter * static_cast<double>(parameter_count(model));
  return static_cast<std::int64_t>(tokens / static_cast<double>(tokens_per_update()));
}

std::int64_t Config::warmup() const {
  if (schedule.warmup_updates) return *schedule.warmup_updates;
  return static_cast<std::int64_t>(static_cast<double>(updates()) * *schedule.warmup_fraction);
}

std::int64_t Config::last_update() const { return std::min(updates(), schedule.max_updates.value_or(updates())); }

std::int64_t Config::panel_positions() const {
  std::int64_t positions = 0;
  for (const auto& [begin, end] : diagnostics.hilbert_panel) positions += end - begin;
  return positions;
}

Config parse_config(const std::string& text, const std::string& where, const std::vector<std::string>& overrides,
                    std::int64_t ranks) {
  Json json = parse_text(text, where);
  Source source{where, {}};
  for (const auto& override : overrides) drop_alternative(json, apply_override(json, override, source));

  Config config;
  std::string missing;
  Reader reader(json, "", source, missing);
  visit(reader, config);
  reader.finish();
  if (!missing.empty()) source.reject(missing, "missing, but required");
  fill_in(config);
  check(config, ranks, source);
  return config;
}

Config load_config(const std::filesystem::path& path, const std::vector<std::string>& overrides, std::int64_t ranks) {
  constexpr std::uintmax_t limit = 16 << 20;  // bytes; a config is a page
  std::error_code error;
  if (const auto size = std::filesystem::file_size(path, error); !error && size > limit)
    fail(Exit::usage, "[config] {}: {} bytes, must be at most {}", path.string(), size, limit);
  return parse_config(read_text("config", path), path.string(), overrides, ranks);
}

bool only_cuda_has(const Config& c) {
  return c.precision == "bf16" || c.precision == "tf32" || !special_newton_schulz(c).empty();
}

void check_newton_schulz(const Config& config, const Backend& be) {
  for (const auto& [path, precision] : special_newton_schulz(config))
    if (!be.has(precision))
      fail(Exit::usage, "[config] {}: {} on device {}, which \"auto\" became, must be fp32; cuda has tf32 and bf16",
           path, name_of(precision), be.name());
}

Json to_json(const Config& config) {
  Json json;
  Writer writer(json);
  visit(writer, config);
  return json;
}

// ---- Resuming ----

namespace {

bool may_differ(const std::string& path) {
  for (const std::string_view free : {"device", "precision", "recompute", "batch.micro_batch", "schedule.max_updates",
                                      "log_every", "name", "output", "peak_tflops"})
    if (path == free) return true;
  for (const std::string_view free : {"checkpoint.", "data.", "comm.", "debug."})
    if (path.starts_with(free)) return true;
  return path.ends_with(".newton_schulz_precision");
}

void compare(const Json* before, const Json* now, const std::string& path, std::vector<std::string>& differences) {
  if (may_differ(path) || (before && now && *before == *now)) return;
  if ((!before || before->is_object()) && (!now || now->is_object())) {
    const auto child = [](const Json* object, const std::string& key) -> const Json* {
      return object && object->contains(key) ? &(*object)[key] : nullptr;
    };
    if (before)
      for (const auto& item : before->items())
        compare(&item.value(), child(now, item.key()), join(path, item.key()), differences);
    if (now)
      for (const auto& item : now->items())
        if (!child(before, item.key())) compare(nullptr, &item.value(), join(path, item.key()), differences);
  } else {
    const auto text = [](const Json* value) { return value ? shown(*value) : "absent"; };
    differences.push_back(fmt::format("{}: {} in the checkpoint, {} now", path, text(before), text(now)));
  }
}

}  // namespace

std::vector<std::string> differences_on_resume(const Json& checkpoint, const Json& now) {
  std::vector<std::string> differences;
  compare(&checkpoint, &now, "", differences);
  return differences;
}

}  // namespace rownorm
