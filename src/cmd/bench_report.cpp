// The report of rownorm bench. Its tables are means over the middle half of the rounds by the update's time: one set of
// rounds, so that parts and wholes add up, without the rounds that something else disturbed. Bounds and products alone
// are no parts of a whole: they are medians of all rounds.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "cmd/bench.h"

namespace rownorm::bench {
namespace {

using nlohmann::ordered_json;

const char* name_of(Phase phase) {
  switch (phase) {
    case Phase::gradients:
      return "forward and backward";
    case Phase::optimizer:
      return "optimizer";
    case Phase::diameter:
      return "diameter";
    case Phase::hilbert:
      return "hilbert";
    case Phase::validation:
      return "validation";
  }
  throw std::logic_error("[bench] unknown phase");
}

// First quartile, median, third quartile (of an even number the lower of two).
std::array<double, 3> quartiles(const std::vector<Round>& rounds, const std::function<double(const Round&)>& value) {
  std::vector<double> sorted;
  for (const Round& r : rounds) sorted.push_back(value(r));
  std::sort(sorted.begin(), sorted.end());
  return {sorted[(sorted.size() - 1) / 4], sorted[(sorted.size() - 1) / 2], sorted[(sorted.size() - 1) * 3 / 4]};
}

std::vector<Round> middle_half(std::vector<Round> rounds) {
  std::sort(rounds.begin(), rounds.end(), [](const Round& x, const Round& y) { return x.update() < y.update(); });
  const auto outside = static_cast<std::ptrdiff_t>(rounds.size() / 4);
  return {rounds.begin() + outside, rounds.end() - outside};
}

// A figure that there may not be.
ordered_json value_or_null(bool there, double value) { return there ? ordered_json(value) : ordered_json(nullptr); }

struct Sum {
  Index calls = 0;
  double seconds = 0, flops = 0, bytes = 0, products_bound = 0, stream_bound = 0;
  double bound() const { return products_bound + stream_bound; }

  // The bound of a call is the longer of what its products and its operands take at least.
  void add(const Work& work, double time, double peak, double stream) {
    calls += 1;
    seconds += time;
    flops += work.flops;
    bytes += work.bytes;
    if (peak == 0) return;
    const double products = work.flops / peak, traffic = work.bytes / stream;
    (products > traffic ? products_bound : stream_bound) += std::max(products, traffic);
  }
};

}  // namespace

ordered_json report(const Measured& measured) {
  const Config& c = measured.config;
  const std::vector<Call>& calls = measured.calls;
  const std::vector<Round>& rounds = measured.rounds;
  const auto peak = quartiles(rounds, [](const Round& r) { return r.peak; });
  const auto stream = quartiles(rounds, [](const Round& r) { return r.stream; });
  const bool bounds = peak[1] > 0;
  const double mfu_peak = c.peak_tflops ? *c.peak_tflops * 1e12 : peak[1];  // that of the config goes before
  const std::vector<Round> kept = middle_half(rounds);
  const auto mean = [&](const auto& value) {
    double sum = 0;
    for (const Round& r : kept) sum += value(r);
    return sum / static_cast<double>(kept.size());
  };
  const double update = mean([](const Round& r) { return r.update(); });

  std::map<std::pair<Phase, std::string>, Sum> operations;
  std::map<Product, Sum> linear;  // of the update
  std::map<Phase, double> attributed;
  double newton_schulz_flops = 0;
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const auto& [phase, work, from, to] = calls[i];
    const double seconds = mean([i](const Round& r) { return r.calls[i]; });
    operations[{phase, work.operation}].add(work, seconds, peak[1], stream[1]);
    attributed[phase] += seconds;
    const std::string operation = work.operation;
    if (!in_update(phase)) continue;
    if (operation == "newton_schulz") newton_schulz_flops += work.flops;
    if (operation.starts_with("linear"))
      linear[{operation, work.sizes[0], work.sizes[1], work.sizes[2]}].add(work, seconds, peak[1], stream[1]);
  }

  const double tokens = static_cast<double>(c.tokens_per_update());
  const double model_flops = flops_per_token(c.model) * tokens;
  ordered_json j;
  j["name"] = c.name;
  j["device"] = measured.device;
  j["updates"] = rounds.size();
  j["parameters"] = parameter_count(c.model);
  j["peak"] = bounds ? ordered_json{{"flops_per_second", peak[1]}, {"quartiles", peak}} : ordered_json(nullptr);
  j["bandwidth"] =
      bounds ? ordered_json{{"bytes_per_second", stream[1]}, {"quartiles", stream}} : ordered_json(nullptr);
  j["update"] = {
      {"seconds", update},
      {"quartiles", quartiles(rounds, [](const Round& r) { return r.update(); })},
      {"tokens", c.tokens_per_update()},
      {"tokens_per_second", tokens / update},
      {"model_flops", model_flops},
      {"newton_schulz_flops", newton_schulz_flops},
      {"model_flops_per_second", model_flops / update},
      {"mfu_peak", value_or_null(mfu_peak > 0, mfu_peak)},
      {"mfu", value_or_null(mfu_peak > 0, model_flops / update / mfu_peak)},
      {"mfu_with_newton_schulz", value_or_null(mfu_peak > 0, (model_flops + newton_schulz_flops) / update / mfu_peak)}};

  // An evaluation is config.evaluation.tokens, of which one micro-batch was measured.
  const double evaluations = measured.validation_tokens > 0 ? static_cast<double>(c.evaluation.tokens) /
                                                                  static_cast<double>(measured.validation_tokens)
                                                            : 0;
  for (const auto& of_phase : kept[0].seconds) {
    const Phase phase = of_phase.first;
    const double seconds = mean([phase](const Round& r) { return r.seconds.at(phase); });
    const Index every = in_update(phase)           ? 1
                        : phase == Phase::diameter ? c.diagnostics.diameter_every
                                                   : c.evaluation.every;
    const double whole = phase == Phase::validation ? seconds * evaluations : seconds;
    j["phases"].push_back(
        {{"phase", name_of(phase)},
         {"measured_seconds", seconds},
         {"unattributed_seconds", seconds - attributed[phase]},
         {"unattributed_share", (seconds - attributed[phase]) / (in_update(phase) ? update : seconds)},
         {"seconds", whole},
         {"every", every},
         {"seconds_per_update", whole / static_cast<double>(every)}});
  }
  for (const auto& [key, sum] : operations) {
    const Phase phase = key.first;
    const double whole = in_update(phase) ? update : mean([phase](const Round& r) { return r.seconds.at(phase); });
    j["operations"].push_back({{"phase", name_of(phase)},
                               {"operation", key.second},
                               {"calls", sum.calls},
                               {"seconds", sum.seconds},
                               {"share", sum.seconds / whole},
                               {"flops", sum.flops},
                               {"bytes", sum.bytes},
                               {"flops_per_second", sum.flops / sum.seconds},
                               {"bytes_per_second", sum.bytes / sum.seconds},
                               {"bound", sum.bound() == 0                        ? ordered_json(nullptr)
                                         : sum.products_bound > sum.stream_bound ? ordered_json("peak")
                                                                                 : ordered_json("bandwidth")},
                               {"of_bound", value_or_null(sum.bound() > 0, sum.bound() / sum.seconds)}});
  }
  std::stable_sort(j["operations"].begin(), j["operations"].end(), [](const ordered_json& x, const ordered_json& y) {
    return x["seconds"].get<double>() > y["seconds"].get<double>();
  });

  std::size_t i = 0;
  for (const auto& [p, use] : measured.products) {
    const double alone = quartiles(rounds, [i](const Round& r) { return r.alone[i]; })[1];
    const double rate = p.flops() / alone;
    ordered_json within_update = nullptr;  // a product within another operation cannot be seen there
    if (const auto found = linear.find(p); found != linear.end())
      within_update = found->second.flops / found->second.seconds;
    j["products"].push_back({{"product", p.operation},
                             {"sizes", {p.N, p.m, p.k}},
                             {"within", use.within},
                             {"count", use.count},
                             {"flops", p.flops()},
                             {"flops_per_second_alone", rate},
                             {"of_peak_alone", value_or_null(bounds, rate / peak[1])},
                             {"flops_per_second_in_update", within_update}});
    ++i;
  }
  return j;
}

void print_text(const ordered_json& j) {
  const auto percent = [](const ordered_json& v) {
    return v.is_null() ? "n/a" : fmt::format("{:.1f}%", 100 * v.get<double>());
  };
  const auto giga = [](const ordered_json& v) {
    return v.is_null() || v.get<double>() == 0 ? "-" : fmt::format("{:.1f}", v.get<double>() / 1e9);
  };
  const auto ms = [](const ordered_json& v) { return fmt::format("{:.3f}", 1e3 * v.get<double>()); };
  const auto& u = j["update"];
  fmt::print("{}: {} parameters, {} tokens an update, {} updates\n{}\n\n", j["name"].get<std::string>(),
             j["parameters"].dump(), u["tokens"].dump(), j["updates"].dump(), j["device"].get<std::string>());
  fmt::print("{:<28}{:>10}  {}\n", "", "median", "quartiles");
  const auto spread = [&](const char* what, const ordered_json& from, double unit, const char* name) {
    if (from.is_null()) return fmt::print("{:<28}{:>10}\n", what, "n/a");
    const auto q = from["quartiles"].get<std::array<double, 3>>();
    fmt::print("{:<28}{:>10.1f}  {:.1f} to {:.1f} {}\n", what, q[1] * unit, q[0] * unit, q[2] * unit, name);
  };
  spread("peak of products", j["peak"], 1e-9, "GFLOP/s");
  spread("memory bandwidth", j["bandwidth"], 1e-9, "GB/s");
  spread("update", u, 1e3, "ms");
  fmt::print("\n{:.0f} tokens/s; model {:.4g} GFLOP an update, {} GFLOP/s: {} of the peak of {} GFLOP/s (MFU)\n",
             u["tokens_per_second"].get<double>(), u["model_flops"].get<double>() / 1e9,
             giga(u["model_flops_per_second"]), percent(u["mfu"]), giga(u["mfu_peak"]));
  fmt::print("Newton-Schulz {:.4g} GFLOP more an update: {} of peak with it\n\n",
             u["newton_schulz_flops"].get<double>() / 1e9, percent(u["mfu_with_newton_schulz"]));

  fmt::print("{:<22}{:>12}{:>8}{:>16}\n", "phase", "ms", "every", "ms an update");
  for (const auto& p : j["phases"])
    fmt::print("{:<22}{:>12}{:>8}{:>16}\n", p["phase"].get<std::string>(), ms(p["seconds"]), p["every"].dump(),
               ms(p["seconds_per_update"]));

  for (const auto& p : j["phases"]) {
    const auto phase = p["phase"].get<std::string>();
    fmt::print("\n{:<24}{:>6}{:>11}{:>8}{:>10}{:>8}{:>11}{:>10}\n", phase, "calls", "ms", "share", "GFLOP/s", "GB/s",
               "bound", "of bound");
    for (const auto& o : j["operations"])
      if (o["phase"] == phase)
        fmt::print("{:<24}{:>6}{:>11}{:>8}{:>10}{:>8}{:>11}{:>10}\n", o["operation"].get<std::string>(),
                   o["calls"].dump(), ms(o["seconds"]), percent(o["share"]), giga(o["flops_per_second"]),
                   giga(o["bytes_per_second"]), o["bound"].is_null() ? "-" : o["bound"].get<std::string>(),
                   percent(o["of_bound"]));
    fmt::print("{:<24}{:>6}{:>11}{:>8}\n", "unattributed", "", ms(p["unattributed_seconds"]),
               percent(p["unattributed_share"]));
  }

  fmt::print("\n{:<42}{:>7}{:>18}{:>10}{:>20}  {}\n", "product (N, m, k)", "count", "GFLOP/s: alone", "of peak",
             "in the update", "within");
  for (const auto& p : j["products"]) {
    const auto n = p["sizes"].get<std::array<Index, 3>>();
    std::string within;
    for (const auto& name : p["within"]) within += (within.empty() ? "" : ", ") + name.get<std::string>();
    fmt::print("{:<42}{:>7}{:>18}{:>10}{:>20}  {}\n",
               fmt::format("{} {} x {} x {}", p["product"].get<std::string>(), n[0], n[1], n[2]), p["count"].dump(),
               giga(p["flops_per_second_alone"]), percent(p["of_peak_alone"]), giga(p["flops_per_second_in_update"]),
               within);
  }
}

}  // namespace rownorm::bench
