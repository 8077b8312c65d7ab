// rownorm bench: where the time of an update goes, and how far from the machine's bounds each operation is.
//
// One update unmeasured, which lists the operations; then rounds of: the machine's bounds, each matrix product of the
// update alone, an update as in training, the measurements. All take turns, so that what slows the machine for a while
// slows all of them. Times are between marks in the backend's queue (ops/backend.h).
#include "cmd/bench.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>

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

using namespace bench;

// ---- what is observed ----

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

// The products that the update's operations consist of. (Attention's are not listed: they are causal tiles.)
std::map<Product, Use> products_of(const std::vector<Call>& calls, const Backend& be) {
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
      const Index chunk = be.logits_chunk(), columns = be.logits_columns(size[1]);
      for (Index begin = 0; begin < size[0]; begin += chunk) {
        const Index rows = std::min(chunk, size[0] - begin);
        for (const char* product : {"linear", "linear_input_grad", "linear_weight_grad"})
          add(product, rows, columns, size[2]);
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
  check_newton_schulz(c, *b.be);
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

}  // namespace

int bench_command(const BenchOptions& options) {
  std::vector<std::string> overrides = options.overrides;
  if (!options.device.empty()) overrides.push_back("device=" + options.device);
  const Config config = load_config(options.config, overrides);
  check_device_and_precision(config.device, config.precision);
  Bench b = make_bench(config);

  Round unmeasured;
  Measured m{config, b.be->description()};
  if (b.validation_set) m.validation_tokens = b.validation_set->sequences() * config.model.context;
  m.calls = run_update_and_measurements(b, unmeasured);
  check_numbers(b);
  m.products = products_of(m.calls, *b.be);
  std::optional<ProductOperands> operands;
  b.product_memory = allocate_tensors(
      *b.be, [&](Arena& arena) { operands.emplace(arena, m.products, b.be->compute_dtype(), b.be->master_dtype()); });

  b.be->prepare_probes(b.probe);
  run_probes_and_products(b, m.products, *operands, unmeasured);

  m.rounds.resize(static_cast<std::size_t>(options.updates));
  for (Round& round : m.rounds) {
    run_probes_and_products(b, m.products, *operands, round);
    run_update_and_measurements(b, round);
    check_numbers(b);
    if (round.calls.size() != m.calls.size()) throw std::logic_error("[bench] updates differ in their operations");
  }
  const nlohmann::ordered_json result = report(m);
  if (options.json)
    fmt::print("{}\n", json_text(result, 2));
  else
    print_text(result);
  return static_cast<int>(Exit::ok);
}

}  // namespace rownorm
