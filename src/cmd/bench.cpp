// rownorm bench: where the time of an update goes, and how far from the machine's bounds each operation is.
//
// One update unmeasured, which lists the operations; then rounds of: the machine's bounds, each matrix product of the
// update alone, an update as in training, the measurements. All take turns, so that what slows the machine for a while
// slows all of them. The tables are means over the middle half of the rounds by the update's time: one set of rounds,
// so that parts and wholes add up, without the rounds that something else disturbed. Times are between marks in the
// backend's queue (ops/backend.h). Bounds and products alone are no parts of a whole: they are medians of all rounds.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <stdexcept>
#include <tuple>

#include "base/error.h"
#include "base/json.h"
#include "base/random.h"
#include "cmd/commands.h"
#include "comm/comm.h"
#include "data/batches.h"
#include "geometry/diameter.h"
#include "ops/open.h"
#include "train/batch_reader.h"
#include "train/config.h"
#include "train/log.h"
#include "train/run_directory.h"
#include "train/step.h"
#include "train/training.h"
#include "train/validation.h"

namespace rownorm {
namespace {

using nlohmann::ordered_json;
using Index = std::int64_t;

// ---- what is observed ----

enum class Phase { gradients, optimizer, diameter, hilbert, validation };

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

bool in_update(Phase phase) { return phase == Phase::gradients || phase == Phase::optimizer; }

struct Call {
  Phase phase;
  Work work;
  Index from = 0, to = 0;  // marks
};

// Every operation of a round, in order.
class Recorder final : public Observer {
 public:
  explicit Recorder(Backend& be) : be_(be) { be_.observe(this); }
  ~Recorder() override { be_.observe(nullptr); }
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  // step() is one piece: its gradients are whole where their norm begins.
  void begin(const Work& work) override {
    const Index now = be_.mark();
    if (phase == Phase::gradients && std::strcmp(work.operation, "squared_norm") == 0) {
      phase = Phase::optimizer;
      gradients_whole = now;
    }
    calls.push_back({phase, work, now});
  }
  void end() override { calls.back().to = be_.mark(); }

  Phase phase = Phase::gradients;
  Index gradients_whole = 0;  // mark
  std::vector<Call> calls;

 private:
  Backend& be_;
};

// ---- the matrix products of an update ----

// One of the three linear operations with its sizes: y(N,m) = x(N,k) w(m,k)^T, dx(N,k) = dy(N,m) w(m,k),
// dw(m,k) += dy(N,m)^T x(N,k).
struct Product {
  std::string operation;
  Index N, m, k;
  friend bool operator<(const Product& a, const Product& b) {
    return std::tie(a.operation, a.N, a.m, a.k) < std::tie(b.operation, b.N, b.m, b.k);
  }
  double flops() const { return 2 * static_cast<double>(N) * static_cast<double>(m) * static_cast<double>(k); }
};

struct Use {
  std::set<std::string> within;  // operations
  Index count = 0;               // in an update
};

// The products that the update's operations consist of. (Attention's are not listed: they are causal tiles.)
std::map<Product, Use> products_of(const std::vector<Call>& calls, Index logits_chunk) {
  std::map<Product, Use> products;
  for (const auto& [phase, work, from, to] : calls) {
    if (!in_update(phase) || work.sizes.rank() == 0) continue;
    const std::string operation = work.operation;
    const Shape& size = work.sizes;
    const auto add = [&](const char* as, Index N, Index m, Index k, Index count = 1) {
      Use& use = products[{as, N, m, k}];
      use.within.insert(operation);
      use.count += count;
    };
    if (operation == "head_loss") {
      for (Index begin = 0; begin < size[0]; begin += logits_chunk) {
        const Index rows = std::min(logits_chunk, size[0] - begin);
        add("linear", rows, size[1], size[2]);
        add("linear_input_grad", rows, size[1], size[2]);
        add("linear_weight_grad", rows, size[1], size[2]);
      }
    } else if (operation == "newton_schulz") {  // A = x x^T; b A + c A A; (b A + c A A) x: or of the transpose
      const Index m = size[1], n = size[2], side = std::min(m, n), count = size[0] * size[3];
      if (m > n)
        add("linear_weight_grad", m, n, n, count);
      else
        add("linear", m, m, n, count);
      add("linear_input_grad", side, side, side, count);
      add("linear_input_grad", m, side, n, count);
    } else {
      add(work.operation, size[0], size[1], size[2]);
    }
  }
  return products;
}

// Operands for every product, one at a time.
struct ProductOperands {
  Tensor nm, nk, mk;

  ProductOperands(Arena& arena, const std::map<Product, Use>& products, DType compute, DType master) {
    Index nm_size = 0, nk_size = 0, mk_size = 0;
    for (const auto& [p, use] : products) {
      nm_size = std::max(nm_size, p.N * p.m);
      nk_size = std::max(nk_size, p.N * p.k);
      mk_size = std::max(mk_size, p.m * p.k);
    }
    nm = arena.add("products alone", compute, {nm_size});
    nk = arena.add("products alone", compute, {nk_size});
    mk = arena.add("products alone", master, {mk_size});  // of a weight, or of its gradient
  }

  void run(Backend& be, const Product& p) const {
    const Tensor n_m{nm.data, be.compute_dtype(), {p.N, p.m}}, n_k{nk.data, be.compute_dtype(), {p.N, p.k}};
    const Tensor weight{mk.data, be.compute_dtype(), {p.m, p.k}}, gradient{mk.data, be.master_dtype(), {p.m, p.k}};
    if (p.operation == "linear") be.linear(n_m, n_k, weight);
    if (p.operation == "linear_input_grad") be.linear_input_grad(n_k, n_m, weight);
    if (p.operation == "linear_weight_grad") be.linear_weight_grad(gradient, n_m, n_k);
  }
};

// ---- one run of the bench ----

struct Bench {
  Config config;
  std::unique_ptr<Comm> comm = make_single_process();
  std::unique_ptr<Backend> be;
  std::unique_ptr<ShardSet> train, validation;
  std::optional<ValidationSet> validation_set;
  Memory memory, product_memory;
  Training t;
  Tensor probe;
  std::unique_ptr<BatchReader> batches;
  Index update = 0;
};

struct Round {
  double peak = 0, stream = 0;      // FLOP/s, bytes/s; 0: the device has no such figure
  std::vector<double> alone;        // seconds of each product
  std::map<Phase, double> seconds;  // of each phase
  std::vector<double> calls;        // seconds of each operation
  double update() const { return seconds.at(Phase::gradients) + seconds.at(Phase::optimizer); }
};

// Tokens whose frequency falls like 1 / rank, as that of words does: floor(V^u) - 1, u uniform in [0, 1).
std::vector<std::uint16_t> synthetic_tokens(const Config& c, std::uint64_t stream, Index sequences) {
  const std::uint64_t entropy[]{c.seed, stream};
  Pcg64 random{SeedSequence(entropy)};
  std::vector<std::uint16_t> tokens(static_cast<std::size_t>(sequences * c.model.context + 1));
  for (std::uint16_t& token : tokens) {
    const double rank = std::pow(static_cast<double>(c.model.vocab_size), random.next32() * 0x1p-32);
    token = static_cast<std::uint16_t>(std::min(static_cast<Index>(rank), c.model.vocab_size) - 1);
  }
  return tokens;
}

Bench make_bench(const Config& config) {
  Bench b;
  b.config = config;
  const Config& c = b.config;
  b.be = open_backend(c.device, c.precision);
  log_line(version_line());
  log_line(fmt::format("device: {}", b.be->description()));
  const Index vocab = c.model.vocab_size;
  b.train = std::make_unique<ShardSet>("train", synthetic_tokens(c, 0, c.batch.sequences), vocab);  // of one update
  if (c.evaluation.every > 0) {  // one micro-batch of it
    const Index sequences = std::min(c.batch.micro_batch, c.evaluation.tokens / c.model.context);
    b.validation = std::make_unique<ShardSet>("validation", synthetic_tokens(c, 1, sequences), vocab);
    b.validation_set.emplace(*b.validation, c.model.context, sequences);
  }
  const WorkspaceSizes sizes = workspace_sizes(c);
  b.memory = allocate_tensors(*b.be, [&](Arena& arena) {
    b.t = make_training(arena, c, b.be->compute_dtype(), b.be->master_dtype(), b.be->workspace_bytes(sizes), 0, 1);
    b.probe = arena.add("the machine's bounds", DType::u8, {b.be->probe_bytes()});
  });
  b.be->set_workspace(b.t.workspace, sizes);
  b.be->fill(b.t.control.ok, 1);
  upload_rope(*b.be, b.t.activations, c.model);
  initialize(*b.be, b.t.master, c.model, c.seed);
  copy(*b.be, b.t.weights, b.t.master);
  b.batches = std::make_unique<BatchReader>(
      *b.be, *b.train, TrainingOrder(c.seed, {b.train->tokens()}, c.model.context, c.batch.sequences), c, 0, 1, 1,
      std::numeric_limits<Index>::max());
  return b;
}

// The update as `train` makes it, at the peak rates, then the measurements that the config asks for. Returns their
// operations.
std::vector<Call> run_update_and_measurements(Bench& b, Round& round) {
  Backend& be = *b.be;
  const Config& c = b.config;
  Recorder recorder(be);
  const Index begin = be.mark();
  step(be, *b.comm, c, b.t, *b.batches, ++b.update, 1);
  const Index end = be.mark();
  round.seconds[Phase::gradients] = be.seconds_between(begin, recorder.gradients_whole);
  round.seconds[Phase::optimizer] = be.seconds_between(recorder.gradients_whole, end);

  const auto measure = [&](Phase phase, const auto& work) {
    recorder.phase = phase;
    const Index from = be.mark();
    work();
    round.seconds[phase] = be.seconds_between(from, be.mark());
  };
  const Tensor head_step = owned_head_step(b.t.optimizer, 0);
  if (c.diagnostics.diameter_every > 0)
    measure(Phase::diameter, [&] { measure_step(be, *b.comm, b.t.diameter, head_step); });
  if (b.validation_set) {
    const Panel* panel = c.panel_positions() > 0 ? &b.t.panel : nullptr;
    measure(Phase::validation, [&] {
      validate(be, *b.comm, c.model, b.t.weights, b.t.activations, b.t.validation_loss, *b.validation_set, panel);
    });
    if (panel) measure(Phase::hilbert, [&] { hilbert_rms(be, *b.comm, *panel, head_step); });
  }
  for (const Call& call : recorder.calls) round.calls.push_back(be.seconds_between(call.from, call.to));
  return recorder.calls;
}

// After a number that is not finite the operations do not do what they do in a run.
void check_numbers(Bench& b) {
  if (b.be->read(b.t.control.ok) == 0)
    fail(Exit::numbers, "[bench] update {}: loss {}, gradient norm {}: must be finite (a smaller rate?)", b.update,
         std::abs(b.be->read(b.t.loss)), std::abs(b.be->read(b.t.control.norm)));
}

// Calls that take about as long as the peak's: on a machine with other work a shorter time is either undisturbed or
// very much disturbed, and its median no longer comparable.
Index repetitions(const Product& p) { return std::clamp<Index>(static_cast<Index>(1e9 / p.flops()), 1, 128); }

void run_probes_and_products(Bench& b, const std::map<Product, Use>& products, const ProductOperands& operands,
                             Round& round) {
  Backend& be = *b.be;
  const auto rate = [&](double (Backend::*probe)(Tensor)) {
    const Index from = be.mark();
    const double work = (be.*probe)(b.probe);
    return work / be.seconds_between(from, be.mark());
  };
  round.peak = rate(&Backend::probe_products);
  round.stream = rate(&Backend::probe_stream);
  for (const auto& [product, use] : products) {
    const Index times = repetitions(product), from = be.mark();
    for (Index i = 0; i < times; ++i) operands.run(be, product);
    round.alone.push_back(be.seconds_between(from, be.mark()) / static_cast<double>(times));
  }
}

// ---- the report ----

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

ordered_json report(const Bench& b, const std::vector<Round>& rounds, const std::vector<Call>& calls,
                    const std::map<Product, Use>& products) {
  const Config& c = b.config;
  const auto peak = quartiles(rounds, [](const Round& r) { return r.peak; });
  const auto stream = quartiles(rounds, [](const Round& r) { return r.stream; });
  const bool bounds = peak[1] > 0;
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
  j["device"] = b.be->description();
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
      {"mfu", value_or_null(bounds, model_flops / update / peak[1])},
      {"mfu_with_newton_schulz", value_or_null(bounds, (model_flops + newton_schulz_flops) / update / peak[1])}};

  // An evaluation is config.evaluation.tokens, of which one micro-batch was measured.
  const double evaluations = b.validation_set ? static_cast<double>(c.evaluation.tokens) /
                                                    static_cast<double>(b.validation_set->sequences() * c.model.context)
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
  for (const auto& [p, use] : products) {
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
  fmt::print("\n{:.0f} tokens/s; model {:.4g} GFLOP an update, {} GFLOP/s: {} of peak (MFU)\n",
             u["tokens_per_second"].get<double>(), u["model_flops"].get<double>() / 1e9,
             giga(u["model_flops_per_second"]), percent(u["mfu"]));
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

}  // namespace

int bench_command(const BenchOptions& options) {
  std::vector<std::string> overrides = options.overrides;
  if (!options.device.empty()) overrides.push_back("device=" + options.device);
  const Config config = load_config(options.config, overrides);
  check_device_and_precision(config.device, config.precision);
  Bench b = make_bench(config);

  Round unmeasured;
  const std::vector<Call> calls = run_update_and_measurements(b, unmeasured);
  check_numbers(b);
  const auto products = products_of(calls, b.be->logits_chunk());
  std::optional<ProductOperands> operands;
  b.product_memory = allocate_tensors(
      *b.be, [&](Arena& arena) { operands.emplace(arena, products, b.be->compute_dtype(), b.be->master_dtype()); });

  std::vector<Round> rounds(static_cast<std::size_t>(options.updates));
  for (Round& round : rounds) {
    run_probes_and_products(b, products, *operands, round);
    run_update_and_measurements(b, round);
    check_numbers(b);
    if (round.calls.size() != calls.size()) throw std::logic_error("[bench] updates differ in their operations");
  }
  const ordered_json result = report(b, rounds, calls, products);
  if (options.json)
    fmt::print("{}\n", json_text(result, 2));
  else
    print_text(result);
  return static_cast<int>(Exit::ok);
}

}  // namespace rownorm
