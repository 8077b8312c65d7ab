#include <gtest/gtest.h>

#include <cstdlib>
#include <limits>

#include "base/expect_error.h"
#include "base/temporary_folder.h"
#include "golden.h"
#include "train/config.h"

namespace rownorm {
namespace {

using Json = nlohmann::ordered_json;
using Overrides = std::vector<std::string>;

// Only what is required; 16 * 4^2 * 2 + 2 * 10 * 4 = 592 parameters, 8 * 5 = 40 tokens an update.
const std::string minimal = R"({
  "model": { "vocab_size": 10, "context": 5, "layers": 2, "width": 4, "head_dim": 2 },
  "data": { "train": "d/t_*.bin", "validation": "d/v.bin" },
  "batch": { "sequences": 8, "micro_batch": 4 },
  "schedule": { "updates": 100 },
  "optimizer": { "hidden": { "algorithm": "muon", "lr": 0.008 },
                 "embedding": { "algorithm": "adamw", "lr": 0.004 },
                 "head": { "algorithm": "rownorm", "lr": 0.0032 } },
  "output": "runs/some-run"
})";

Config parse(const Overrides& overrides = {}, std::int64_t ranks = 1) {
  return parse_config(minimal, "c.json", overrides, ranks);
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const auto at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

// The file c.json says `text`: refused with exit 2 and this line.
void refuse_text(const std::string& text, const std::string& message) {
  expect_error(Exit::usage, message, [&] { parse_config(text, "c.json", {}); });
}
void refuse_edit(const std::string& from, const std::string& to, const std::string& message) {
  refuse_text(replaced(minimal, from, to), "[config] c.json: " + message);
}
// --set argument: refused, and the argument is blamed.
void refuse(const std::string& argument, const std::string& message, std::int64_t ranks = 1) {
  expect_error(Exit::usage, "[config] --set " + argument + ": " + message, [&] { parse({argument}, ranks); });
}

TEST(Config, EverythingNotRequiredHasTheDocumentedDefault) {
  const Config c = parse();
  EXPECT_EQ(c.name, "some-run");
  EXPECT_EQ(c.seed, 0u);
  EXPECT_EQ(c.device, "auto");
  EXPECT_EQ(c.precision, "auto");
  EXPECT_EQ(c.recompute, Recompute::none);
  EXPECT_EQ(c.model.vocab_size, 10);
  EXPECT_EQ(c.model.context, 5);
  EXPECT_EQ(c.model.layers, 2);
  EXPECT_EQ(c.model.width, 4);
  EXPECT_EQ(c.model.head_dim, 2);
  EXPECT_EQ(c.model.mlp_ratio, 4);
  EXPECT_EQ(c.model.rope_base, 10000);
  EXPECT_EQ(c.model.norm_eps, 1e-6);
  EXPECT_EQ(c.model.init_std, 0.02);
  EXPECT_EQ(c.data.train, "d/t_*.bin");
  EXPECT_EQ(c.data.validation, "d/v.bin");
  EXPECT_EQ(c.batch.sequences, 8);
  EXPECT_EQ(c.batch.micro_batch, 4);
  EXPECT_EQ(c.schedule.updates, 100);
  EXPECT_EQ(c.schedule.tokens_per_parameter, std::nullopt);
  EXPECT_EQ(c.schedule.warmup_fraction, 0.1);
  EXPECT_EQ(c.schedule.warmup_updates, std::nullopt);
  EXPECT_EQ(c.schedule.min_lr_ratio, 0.1);
  EXPECT_EQ(c.schedule.max_updates, std::nullopt);
  EXPECT_EQ(c.clip_norm, 1.0);
  EXPECT_EQ(c.evaluation.every, 500);
  EXPECT_EQ(c.evaluation.tokens, 5242880);
  EXPECT_FALSE(c.evaluation.at_start);
  EXPECT_EQ(c.diagnostics.diameter_every, 10);
  EXPECT_TRUE(c.diagnostics.hilbert_panel.empty());
  EXPECT_EQ(c.log_every, 10);
  EXPECT_EQ(c.checkpoint.every, 1000);
  EXPECT_EQ(c.checkpoint.keep, 2);
  EXPECT_TRUE(c.checkpoint.keep_updates.empty());
  EXPECT_EQ(c.init_from, std::nullopt);
  EXPECT_EQ(c.output, "runs/some-run");
  EXPECT_EQ(parse({"model.context=7"}).evaluation.tokens, 5242880 / 7 * 7);
}

TEST(Config, OptimizerDefaultsAreThePapersForEachAlgorithmInEveryRole) {
  for (const std::string role : {"hidden", "embedding", "head"}) {
    const auto optimizer = [&](const std::string& algorithm) {
      const Config c = parse({"optimizer." + role + R"(={"algorithm":")" + algorithm + R"(","lr":1})"});
      return role == "hidden" ? c.optimizer.hidden : role == "head" ? c.optimizer.head : c.optimizer.embedding;
    };
    const OptimizerConfig muon = optimizer("muon");
    EXPECT_EQ(muon.algorithm, Algorithm::muon);
    EXPECT_EQ(muon.lr, 1);
    EXPECT_EQ(muon.momentum, 0.95);
    EXPECT_TRUE(muon.nesterov);
    EXPECT_EQ(muon.weight_decay, 0.1);
    EXPECT_EQ(muon.newton_schulz_steps, 5);
    EXPECT_EQ(muon.newton_schulz_precision, NewtonSchulzPrecision::fp32);
    EXPECT_EQ(muon.eps, 1e-5);
    const OptimizerConfig adamw = optimizer("adamw");
    EXPECT_EQ(adamw.algorithm, Algorithm::adamw);
    EXPECT_EQ(adamw.betas, (std::array{0.9, 0.999}));
    EXPECT_EQ(adamw.eps, 1e-10);
    EXPECT_EQ(adamw.weight_decay, 0.1);
    const OptimizerConfig rownorm = optimizer("rownorm");
    EXPECT_EQ(rownorm.algorithm, Algorithm::rownorm);
    EXPECT_EQ(rownorm.beta, 0.95);
    EXPECT_EQ(rownorm.eps, 1e-8);
    EXPECT_EQ(rownorm.weight_decay, 0);
    EXPECT_FALSE(rownorm.projected);
  }
}

TEST(Config, NameIsTheLastComponentOfTheOutput) {
  EXPECT_EQ(parse({"output=a/b/"}).name, "b");
  EXPECT_EQ(parse({"output=b"}).name, "b");
  EXPECT_EQ(parse({"output=/"}).name, "/");
  EXPECT_EQ(parse({"output=a/b", "name=c"}).name, "c");
}

// ---- The text ----

TEST(ConfigText, CommentsAreAllowed) {
  const auto text = "// a run\n" + replaced(minimal, "\"data\"", "/* the\n data */ \"data\"") + " // end";
  EXPECT_EQ(to_json(parse_config(text, "c.json", {})), to_json(parse()));
}

TEST(ConfigText, BrokenJsonIsNamedWithLineAndColumn) {
  refuse_text("", "[config] c.json: not valid JSON: line 1, column 1: ");
  refuse_text("{\n  \"name\": \"x\",\n}", "[config] c.json: not valid JSON: line 3, column 1: ");
  refuse_text("{ \"name\": tru }", "[config] c.json: not valid JSON: line 1, column 14: ");
  refuse_text("{} {}", "[config] c.json: not valid JSON: line 1, column 4: ");
  refuse_text("{ \"name\": \"\xff\" }", "[config] c.json: not valid JSON: line 1, column 12: ");
  refuse_text("[1, 2]", "[config] c.json: the file is [1,2], must be an object {...}");
  refuse_text(std::string(1'000'000, '['), "[config] c.json: nested more than 16 deep");
}

TEST(ConfigText, DuplicateKeysAreNamedWithTheFullPath) {
  refuse_edit("\"lr\": 0.004", "\"lr\": 0.004, \"lr\": 0.005", "optimizer.embedding.lr: duplicate key");
  refuse_edit("\"output\"", "\"model\": {}, \"output\"", "model: duplicate key");
  refuse(R"(model={"width":1,"width":2})", "model.width: duplicate key");
}

TEST(ConfigText, NumbersBeyondADoubleAreNamed) {
  refuse_edit("0.0032", "1e999", "optimizer.head.lr: '1e999', must be a finite number");
  refuse_edit("0.0032", "-1e999", "optimizer.head.lr: '-1e999', must be a finite number");
  refuse_text("1e999", "[config] c.json: the value: '1e999', must be a finite number");
  refuse("optimizer.head.lr=1e999", "optimizer.head.lr: '1e999', must be a finite number");
}

TEST(ConfigText, AMissingFileIsADataError) {
  const TemporaryFolder folder;
  const auto path = folder / "absent.json";
  expect_error(Exit::data, path.string(), [&] { load_config(path, {}); });
  expect_error(Exit::data, folder.path.string(), [&] { load_config(folder.path, {}); });
}

// ---- Keys ----

TEST(ConfigKeys, UnknownKeysAreNamedWithTheNearestValidOne) {
  refuse_edit("\"lr\": 0.0032", "\"lr\": 0.0032, \"beta1\": 0.9",
              "optimizer.head.beta1: unknown key; did you mean beta?");
  refuse_edit("\"lr\": 0.004", "\"lr\": 0.004, \"beta\": 0.9",
              "optimizer.embedding.beta: unknown key; did you mean betas?");
  refuse_edit("\"lr\": 0.008", "\"lr\": 0.008, \"momentun\": 0.9",
              "optimizer.hidden.momentun: unknown key; did you mean momentum?");
  refuse_edit("\"width\"", "\"widht\"", "model.widht: unknown key; did you mean width?");  // not: width is missing
  refuse_edit("\"model\"", "\"modle\"", "modle: unknown key; did you mean model?");
  refuse("optimizer.haed.lr=1", "optimizer.haed: unknown key; did you mean head?");
  refuse("checkpoint.evry=5", "checkpoint.evry: unknown key; did you mean every?");
  refuse("Seed=5", "Seed: unknown key; did you mean seed?");
  refuse_edit("\"output\"", "\"x\\n\": 1, \"output\"", "\"x\\n\": unknown key; did you mean ");  // one line
}

TEST(ConfigKeys, RequiredKeysAreNamed) {
  const Json whole = Json::parse(minimal);
  const std::vector<std::pair<std::string, std::string>> required = {
      {"/model", "model"},
      {"/model/vocab_size", "model.vocab_size"},
      {"/model/context", "model.context"},
      {"/model/layers", "model.layers"},
      {"/model/width", "model.width"},
      {"/model/head_dim", "model.head_dim"},
      {"/data", "data"},
      {"/data/train", "data.train"},
      {"/data/validation", "data.validation"},
      {"/batch", "batch"},
      {"/batch/sequences", "batch.sequences"},
      {"/batch/micro_batch", "batch.micro_batch"},
      {"/schedule", "schedule"},
      {"/schedule/updates", "schedule.tokens_per_parameter or updates"},
      {"/optimizer", "optimizer"},
      {"/optimizer/head", "optimizer.head"},
      {"/optimizer/hidden/algorithm", "optimizer.hidden.algorithm"},
      {"/optimizer/embedding/lr", "optimizer.embedding.lr"},
      {"/output", "output"}};
  for (const auto& [pointer, path] : required) {
    Json json = whole;
    const Json::json_pointer at(pointer);
    json[at.parent_pointer()].erase(at.back());
    refuse_text(json.dump(), "[config] c.json: " + path + ": missing, but required");
  }
}

TEST(ConfigKeys, ValuesOfTheWrongTypeOrOutOfRangeAreNamed) {
  const std::vector<std::array<std::string, 3>> cases = {
      {"name", "3", "a non-empty string"},
      {"name", "\"\"", "a non-empty string"},
      {"output", "null", "a non-empty string"},
      {"data.train", "[]", "a non-empty string"},
      {"seed", "-1", "an integer in [0, 18446744073709551615]"},
      {"seed", "18446744073709551616", "an integer in [0, 18446744073709551615]"},
      {"seed", "1.5", "an integer in [0, 18446744073709551615]"},
      {"device", "\"gpu\"", "one of auto, cpu, cuda, reference"},
      {"precision", "\"fp16\"", "one of auto, bf16, tf32, fp32, fp64"},
      {"recompute", "true", "one of none, block"},
      {"model", "3", "an object {...}"},
      {"model.vocab_size", "0", "an integer in [1, 65536]"},
      {"model.vocab_size", "65537", "an integer in [1, 65536]"},
      {"model.vocab_size", "\"10\"", "an integer in [1, 65536]"},
      {"model.context", "-5", "an integer in [1, 1048576]"},
      {"model.context", "1048577", "an integer in [1, 1048576]"},
      {"model.layers", "2.5", "an integer in [1, 4096]"},
      {"model.layers", "4097", "an integer in [1, 4096]"},
      {"model.layers", "1e300", "an integer in [1, 4096]"},
      {"model.width", "9223372036854775808", "an integer in [1, 1048576]"},
      {"model.width", "true", "an integer in [1, 1048576]"},
      {"model.head_dim", "0", "an integer in [2, 1048576]"},
      {"model.mlp_ratio", "0", "an integer in [1, 256]"},
      {"model.rope_base", "0", "a number > 0"},
      {"model.norm_eps", "-1e-300", "a number >= 0"},
      {"model.init_std", "-1", "a number >= 0"},
      {"batch.sequences", "0", "an integer in [1, 16777216]"},
      {"batch.micro_batch", "0", "an integer in [1, 16777216]"},
      {"schedule.updates", "0", "an integer >= 1"},
      {"schedule.updates", "null", "an integer >= 1"},
      {"schedule.updates", "9007199254740992", "at most 9007199254740991"},
      {"schedule.tokens_per_parameter", "0", "a number > 0"},
      {"schedule.warmup_fraction", "1", "a number in [0, 1)"},
      {"schedule.warmup_updates", "-1", "an integer >= 0"},
      {"schedule.min_lr_ratio", "1.1", "a number in [0, 1]"},
      {"schedule.max_updates", "0", "an integer >= 1"},
      {"clip_norm", "0", "a number > 0"},
      {"clip_norm", "null", "a number > 0"},
      {"optimizer.hidden.algorithm", "\"sgd\"", "one of muon, adamw, rownorm"},
      {"optimizer.hidden.lr", "-1", "a number >= 0"},
      {"optimizer.hidden.lr", "\"nan\"", "a number >= 0"},
      {"optimizer.hidden.momentum", "1", "a number in [0, 1)"},
      {"optimizer.hidden.nesterov", "1", "true or false"},
      {"optimizer.hidden.weight_decay", "-0.1", "a number >= 0"},
      {"optimizer.hidden.newton_schulz_steps", "101", "an integer in [0, 100]"},
      {"optimizer.hidden.newton_schulz_precision", "\"fp16\"", "one of fp32, tf32, bf16"},
      {"optimizer.hidden.eps", "-1", "a number >= 0"},
      {"optimizer.embedding.betas", "0.9", "an array of two numbers"},
      {"optimizer.embedding.betas", "[0.9]", "an array of two numbers"},
      {"optimizer.head.beta", "1", "a number in [0, 1)"},
      {"optimizer.head.projected", "\"yes\"", "true or false"},
      {"evaluation", "[]", "an object {...}"},
      {"evaluation.every", "-1", "an integer >= 0"},
      {"evaluation.tokens", "0", "an integer >= 1"},
      {"evaluation.at_start", "null", "true or false"},
      {"diagnostics.diameter_every", "-1", "an integer >= 0"},
      {"diagnostics.hilbert_panel", "5", "an array of [begin, end] pairs"},
      {"log_every", "0", "an integer >= 1"},
      {"peak_tflops", "0", "a number > 0"},
      {"checkpoint.every", "-1", "an integer >= 0"},
      {"checkpoint.keep", "0", "an integer >= 1"},
      {"checkpoint.keep_updates", "5", "an array of integers"},
      {"init_from", "\"\"", "a non-empty string"},
  };
  for (const auto& [path, value, allowed] : cases) {
    const std::string shown = Json::parse(value).dump();
    refuse(path + "=" + value, path + ": " + shown + ", must be " + allowed);
  }
  refuse("optimizer.embedding.betas=[0.9,1]", "optimizer.embedding.betas[1]: 1, must be a number in [0, 1)");
  refuse("diagnostics.hilbert_panel=[[0,1],[2]]", "diagnostics.hilbert_panel[1]: [2], must be a pair [begin, end]");
  refuse("diagnostics.hilbert_panel=[[0.5,1]]", "diagnostics.hilbert_panel[0][0]: 0.5, must be an integer >= 0");
  refuse("checkpoint.keep_updates=[5,0]", "checkpoint.keep_updates[1]: 0, must be an integer >= 1");
}

TEST(ConfigKeys, EdgesOfTheRangesAreAccepted) {
  const Config c = parse({"seed=18446744073709551615", "model.vocab_size=65536", "optimizer.head.lr=1e308",
                          "optimizer.hidden.lr=0", "optimizer.embedding.betas=[0,0]", "optimizer.embedding.eps=0",
                          "optimizer.head.beta=0", "optimizer.hidden.newton_schulz_steps=0", "schedule.min_lr_ratio=1",
                          "schedule.warmup_updates=0", "evaluation.every=0", "diagnostics.diameter_every=0",
                          "checkpoint.every=0", "model.norm_eps=0", "model.init_std=0", "schedule.updates=1e2"});
  EXPECT_EQ(c.seed, std::numeric_limits<std::uint64_t>::max());
  EXPECT_EQ(c.model.vocab_size, 65536);
  EXPECT_EQ(c.optimizer.head.lr, 1e308);
  EXPECT_EQ(c.schedule.updates, 100);
  EXPECT_EQ(c.warmup(), 0);
}

// ---- What no single key can tell ----

TEST(ConfigCheck, NewtonSchulzInLessThanFp32IsForCuda) {
  const std::string tf32 = "optimizer.hidden.newton_schulz_precision=tf32";
  const std::string bf16 = R"(optimizer.head={"algorithm":"muon","lr":0.1,"newton_schulz_precision":"bf16"})";
  for (const std::string device : {"cpu", "reference"}) {
    const std::string on = "device=" + device;
    expect_error(Exit::usage,
                 "[config] --set " + tf32 + ": optimizer.hidden.newton_schulz_precision: tf32 on device " + device +
                     ", must be fp32; cuda has tf32 and bf16",
                 [&] {
                   parse({on, tf32});
                 });
    expect_error(Exit::usage,
                 "[config] --set " + bf16 + ": optimizer.head.newton_schulz_precision: bf16 on device " + device +
                     ", must be fp32; cuda has tf32 and bf16",
                 [&] {
                   parse({on, bf16});
                 });
    EXPECT_FALSE(only_cuda_has(parse({on, "optimizer.hidden.newton_schulz_precision=fp32"})));
  }
  for (const std::string device : {"cuda", "auto"}) {
    const Config c = parse({"device=" + device, tf32, bf16});
    EXPECT_EQ(c.optimizer.hidden.newton_schulz_precision, NewtonSchulzPrecision::tf32);
    EXPECT_EQ(c.optimizer.head.newton_schulz_precision, NewtonSchulzPrecision::bf16);
    EXPECT_TRUE(only_cuda_has(c));
  }
}

TEST(ConfigCheck, HeadsDivideTheWidth) {
  refuse("model.head_dim=3", "model.head_dim: 3, must be even (RoPE turns pairs)");
  refuse("model.width=5", "model.width: 5, must be a multiple of model.head_dim 2");
}

TEST(ConfigCheck, MicroBatchesOfAllRanksDivideTheBatch) {
  const auto batch = [](int sequences, int micro_batch, std::int64_t ranks) {
    return parse({fmt::format(R"(batch={{"sequences":{},"micro_batch":{}}})", sequences, micro_batch)}, ranks);
  };
  EXPECT_EQ(batch(256, 32, 8).batch.micro_batch, 32);
  EXPECT_EQ(batch(24, 4, 3).tokens_per_update(), 24 * 5);
  const auto refused = [&](int sequences, int micro_batch, std::int64_t ranks, const std::string& message) {
    expect_error(Exit::usage, message, [&] { batch(sequences, micro_batch, ranks); });
  };
  refused(256, 24, 8, "batch.micro_batch: 24, but micro_batch * 8 ranks must divide batch.sequences 256: 16 and 32 do");
  refused(256, 64, 8, "batch.micro_batch: 64, but micro_batch * 8 ranks must divide batch.sequences 256: 32 does");
  refused(30, 7, 3, "batch.micro_batch: 7, but micro_batch * 3 ranks must divide batch.sequences 30: 5 and 10 do");
  refused(256, 32, 3, "batch.sequences: 256, must be a multiple of the 3 ranks");
  refused(4, 1, 8, "batch.sequences: 4, must be a multiple of the 8 ranks");
}

TEST(ConfigCheck, ScheduleHoldsAnUpdateAfterTheWarmup) {
  EXPECT_EQ(parse({"schedule.tokens_per_parameter=0.0676"}).updates(), 1);  // 592 * 0.0676 = 40.02 tokens
  refuse("schedule.tokens_per_parameter=0.0675",
         "schedule.tokens_per_parameter: 39.96 training tokens, must be at least one update of 40");
  EXPECT_EQ(parse({"schedule.warmup_updates=99"}).warmup(), 99);
  refuse("schedule.warmup_updates=100",
         "schedule.warmup_updates: 100 warmup updates, must be fewer than the 100 of the schedule");
  refuse("schedule.tokens_per_parameter=1e308", "schedule.tokens_per_parameter: inf training tokens");
  refuse("schedule.tokens_per_parameter=1.6e16",
         "schedule.tokens_per_parameter: 9.472e+18 training tokens, must be fewer than 2^63");
  EXPECT_EQ(parse({"schedule.updates=9007199254740991"}).updates(), 9007199254740991);
  expect_error(Exit::usage, "schedule.updates: 9.23238e+18 training tokens, must be fewer than 2^63", [] {
    parse({"schedule.updates=9007199254740991", R"(batch={"sequences":205,"micro_batch":1})"});
  });
}

TEST(ConfigCheck, TheLargestModelDoesNotOverflow) {
  const Config c =
      parse({"model={\"vocab_size\":65536,\"context\":1048576,\"layers\":4096,\"width\":1048576,"
             "\"head_dim\":1048576,\"mlp_ratio\":256}"});
  EXPECT_EQ(parameter_count(c.model), (std::int64_t{1} << 52) * (4 + 3 * 256) + (std::int64_t{1} << 37));
  expect_error(
      Exit::usage, "batch.micro_batch: 16777216 sequences of 1048576 tokens, must be fewer than 2^31 tokens", [&] {
        parse(
            {"model={\"vocab_size\":65536,\"context\":1048576,\"layers\":4096,\"width\":1048576,\"head_dim\":2,"
             "\"mlp_ratio\":256}",
             "batch={\"sequences\":16777216,\"micro_batch\":16777216}"});
      });
}

TEST(ConfigCheck, EvaluationIsWholeSequencesAndHoldsThePanel) {
  refuse("evaluation.tokens=12", "evaluation.tokens: 12, must be a multiple of model.context 5, such as 15");
  const auto panel = [](const std::string& ranges) {
    return parse({"evaluation.tokens=20", "diagnostics.hilbert_panel=" + ranges});
  };
  EXPECT_EQ(panel("[[0,3],[3,4],[7,20]]").panel_positions(), 17);
  const auto refused = [&](const std::string& ranges, const std::string& message) {
    expect_error(Exit::usage, "diagnostics.hilbert_panel: " + message, [&] { panel(ranges); });
  };
  refused("[[0,3],[4,21]]", "range 1 is [4, 21], must be begin < end <= evaluation.tokens 20");
  refused("[[3,3]]", "range 0 is [3, 3], must be begin < end <= evaluation.tokens 20");
  refused("[[4,3]]", "range 0 is [4, 3], must be begin < end <= evaluation.tokens 20");
  refused("[[0,4],[3,6]]", "range 1, [3, 6], begins before the one before it ends, at 4; must be ascending and apart");
  refused("[[8,9],[3,6]]", "range 1, [3, 6], begins before the one before it ends, at 9; must be ascending and apart");
  // evaluation.every 0 switches the panel off; it need not be taken out of the file.
  EXPECT_EQ(parse({"evaluation={\"every\":0,\"tokens\":20}", "diagnostics.hilbert_panel=[[0,3]]"}).panel_positions(),
            3);
}

TEST(ConfigCheck, PrecisionIsOneTheDeviceHas) {
  const auto with = [](const std::string& device, const std::string& precision) {
    return parse({"device=" + device, "precision=" + precision}).precision;
  };
  for (const auto& [device, lacks] :
       std::vector<std::pair<std::string, Overrides>>{{"auto", {"fp64"}},
                                                      {"cpu", {"bf16", "tf32", "fp64"}},
                                                      {"cuda", {"fp64"}},
                                                      {"reference", {"bf16", "tf32", "fp32"}}})
    for (const std::string precision : {"auto", "bf16", "tf32", "fp32", "fp64"}) {
      if (std::ranges::find(lacks, precision) == lacks.end())
        EXPECT_EQ(with(device, precision), precision);
      else
        expect_error(Exit::usage, "precision: " + precision + " on device " + device + ", must be ",
                     [&, &d = device] { with(d, precision); });
    }
}

// ---- --set ----

TEST(ConfigSet, ValuesAreJsonOrElseStrings) {
  const Config c =
      parse({"seed=7", "optimizer.head.lr=4e-3", "output=runs/x=y", "name=\"3\"", "data.train=//host/[a",
             "evaluation.at_start=true", "checkpoint.keep_updates=[5,6]", "evaluation.every=3", "evaluation.every=4"});
  EXPECT_EQ(c.seed, 7u);
  EXPECT_EQ(c.optimizer.head.lr, 4e-3);
  EXPECT_EQ(c.output, "runs/x=y");
  EXPECT_EQ(c.name, "3");
  EXPECT_EQ(c.data.train, "//host/[a");
  EXPECT_TRUE(c.evaluation.at_start);
  EXPECT_EQ(c.checkpoint.keep_updates, (std::vector<std::int64_t>{5, 6}));
  EXPECT_EQ(c.evaluation.every, 4);  // the last one counts
}

TEST(ConfigSet, ObjectsReplaceObjects) {
  const Config c = parse({R"(optimizer.head={"algorithm":"adamw","lr":0.004})", "optimizer.head.betas=[0.8,0.9]"});
  EXPECT_EQ(c.optimizer.head.algorithm, Algorithm::adamw);
  EXPECT_EQ(c.optimizer.head.betas, (std::array{0.8, 0.9}));
  refuse(R"(optimizer.head={"algorithm":"adamw"})", "optimizer.head.lr: missing, but required");
}

TEST(ConfigSet, NullSwitchesOff) {
  const Config c = parse({"schedule.max_updates=30", "init_from=a.safetensors"});
  EXPECT_EQ(c.schedule.max_updates, 30);
  EXPECT_EQ(c.last_update(), 30);
  EXPECT_EQ(c.init_from, "a.safetensors");
  const Config off = parse({"schedule.max_updates=30", "init_from=a", "schedule.max_updates=null", "init_from=null"});
  EXPECT_EQ(off.schedule.max_updates, std::nullopt);
  EXPECT_EQ(off.last_update(), 100);
  EXPECT_EQ(off.init_from, std::nullopt);
  EXPECT_EQ(parse({"schedule.max_updates=1000"}).last_update(), 100);
}

TEST(ConfigSet, OneOfTwoAlternativesDropsTheOther) {
  const Config c =
      parse({"schedule.warmup_fraction=0.2", "schedule.tokens_per_parameter=50", "schedule.warmup_updates=3"});
  EXPECT_EQ(c.schedule.tokens_per_parameter, 50);
  EXPECT_EQ(c.schedule.updates, std::nullopt);
  EXPECT_EQ(c.updates(), 592 * 50 / 40);
  EXPECT_EQ(c.warmup(), 3);
  EXPECT_EQ(c.schedule.warmup_fraction, std::nullopt);
  EXPECT_EQ(parse({"schedule.tokens_per_parameter=50", "schedule.updates=9"}).updates(), 9);
  refuse_edit("\"updates\": 100", "\"updates\": 100, \"tokens_per_parameter\": 20",
              "schedule.updates: given together with tokens_per_parameter, must be only one of them");
  refuse_edit("\"updates\": 100", "\"updates\": 100, \"warmup_fraction\": 0, \"warmup_updates\": 0",
              "schedule.warmup_updates: given together with warmup_fraction, must be only one of them");
}

TEST(ConfigSet, ArgumentsThatAreNoPathAndValueAreNamed) {
  refuse("seed", "must be path=value, as in optimizer.head.lr=0.004");
  refuse("=3", "\"\" is not a path such as optimizer.head.lr");
  refuse("model..width=3", "\"model..width\" is not a path such as optimizer.head.lr");
  refuse("model.=3", "\"model.\" is not a path such as optimizer.head.lr");
  refuse("model.width.x=3", "model.width is 4, which has no keys");
  refuse("optimizer.embedding.betas.0=3", "optimizer.embedding.betas: {\"0\":3}, must be an array of two numbers");
  expect_error(Exit::usage, "output: \"\xEF\xBF\xBD\", must be valid UTF-8", [] {
    try {
      parse({"output=\xff"});
    } catch (const Error& error) {  // shown as the escape of U+FFFD
      throw Error(error.code(), replaced(error.what(), "\\ufffd", "\xEF\xBF\xBD"));
    }
  });
  std::string deep = "a";
  for (int i = 0; i < 100'000; ++i) deep += ".a";
  expect_error(Exit::usage, "is not a path", [&] { parse({deep + "=1"}); });
}

// ---- Writing and resuming ----

TEST(ConfigJson, TheResolvedConfigReadsBackEqual) {
  const std::vector<Overrides> variants = {
      {},
      {"seed=18446744073709551615", "optimizer.head.lr=0.0021333333333333334", "optimizer.hidden.lr=5e-324",
       "optimizer.embedding.lr=1.7976931348623157e308", "evaluation.tokens=25",
       "diagnostics.hilbert_panel=[[0,3],[5,6]]", "checkpoint.keep_updates=[3,7]", "init_from=a", "recompute=block",
       "schedule.max_updates=7", "peak_tflops=989.4", "output=r\u00fcns/\"quoted\"", "device=reference",
       "precision=fp64"},
      {"schedule.tokens_per_parameter=0.3", "schedule.warmup_updates=1",
       R"(optimizer.head={"algorithm":"muon","lr":0.1,"nesterov":false,"newton_schulz_precision":"tf32"})",
       R"(optimizer.hidden={"algorithm":"rownorm","lr":0.1,"projected":true})"},
  };
  for (const auto& overrides : variants) {
    const Config config = parse(overrides);
    const Json written = to_json(config);
    const Config again = parse_config(written.dump(2), "config.json", {});
    EXPECT_EQ(to_json(again).dump(), written.dump());
    EXPECT_EQ(again.seed, config.seed);
    EXPECT_EQ(again.optimizer.head.lr, config.optimizer.head.lr);
    EXPECT_EQ(again.optimizer.hidden.lr, config.optimizer.hidden.lr);
    EXPECT_EQ(again.optimizer.embedding.lr, config.optimizer.embedding.lr);
    EXPECT_EQ(again.diagnostics.hilbert_panel, config.diagnostics.hilbert_panel);
    EXPECT_EQ(again.checkpoint.keep_updates, config.checkpoint.keep_updates);
    EXPECT_EQ(again.updates(), config.updates());
    EXPECT_EQ(again.warmup(), config.warmup());
    EXPECT_EQ(again.name, config.name);
    EXPECT_EQ(again.init_from, config.init_from);
    EXPECT_EQ(again.peak_tflops, config.peak_tflops);
    EXPECT_EQ(again.optimizer.head.newton_schulz_precision, config.optimizer.head.newton_schulz_precision);
  }
  EXPECT_EQ(
      to_json(parse({"optimizer.head.lr=0.0021333333333333334"}))["optimizer"]["head"].dump(),
      R"({"algorithm":"rownorm","lr":0.0021333333333333334,"beta":0.95,"eps":1e-08,"weight_decay":0.0,"projected":false})");
  EXPECT_EQ(to_json(parse())["schedule"].dump(),
            R"({"updates":100,"warmup_fraction":0.1,"min_lr_ratio":0.1,"max_updates":null})");
}

TEST(ConfigJson, DifferencesOnResumeAreThoseThatMatter) {
  const Json checkpoint = to_json(parse({"evaluation.tokens=20"}));
  const auto differences = [&](Overrides overrides) {
    overrides.insert(overrides.begin(), "evaluation.tokens=20");
    return differences_on_resume(checkpoint, to_json(parse(overrides)));
  };
  EXPECT_EQ(differences({}), Overrides{});
  EXPECT_EQ(differences({"device=cpu", "precision=fp32", "recompute=block", "batch.micro_batch=2",
                         "schedule.max_updates=3", "log_every=1", "checkpoint.every=1", "checkpoint.keep=9",
                         "checkpoint.keep_updates=[1]", "comm.timeout_seconds=5", "debug.compare_ranks=true", "name=x",
                         "output=y", "data.train=z", "data.validation=z", "peak_tflops=67"}),
            Overrides{});
  EXPECT_EQ(differences({"device=cuda", "optimizer.hidden.newton_schulz_precision=bf16"}), Overrides{});
  EXPECT_EQ(differences({"optimizer.head.lr=0.004", "seed=1"}),
            (Overrides{"seed: 0 in the checkpoint, 1 now", "optimizer.head.lr: 0.0032 in the checkpoint, 0.004 now"}));
  EXPECT_EQ(differences({"diagnostics.hilbert_panel=[[0,3]]"}),
            (Overrides{"diagnostics.hilbert_panel: [] in the checkpoint, [[0,3]] now"}));
  EXPECT_EQ(differences({"schedule.tokens_per_parameter=20"}),
            (Overrides{"schedule.updates: 100 in the checkpoint, absent now",
                       "schedule.tokens_per_parameter: absent in the checkpoint, 20.0 now"}));
  EXPECT_EQ(differences({R"(optimizer.embedding={"algorithm":"muon","lr":0.004,"eps":1e-10})"}).size(), 5u);
  // A number is the same however it is written, and a state.json that holds anything else is no crash.
  EXPECT_EQ(differences_on_resume(Json::parse("{\"lr\":1}"), Json::parse("{\"lr\":1.0}")), Overrides{});
  EXPECT_EQ(differences_on_resume(Json(3), checkpoint).size(), 1u);
  EXPECT_EQ(differences_on_resume(Json::parse("{\"model\":3}"), Json::parse("{\"model\":{\"width\":4}}")),
            (Overrides{"model: 3 in the checkpoint, {\"width\":4} now"}));
}

// ---- The shipped configs ----

TEST(PaperConfigs, HoldTheNumbersOfThePaper) {
  struct Scale {
    std::string name;
    std::int64_t width, parameters, micro_batch, updates, tokens;
    double adamw, rownorm;
  };
  // PAPER 2 and 4.
  const std::vector<Scale> scales = {
      {"190m", 512, 185'680'896, 32, 7'083, 3'713'531'904, 4.0e-3, 3.2e-3},
      {"380m", 768, 379'184'640, 16, 14'464, 7'583'301'632, 8e-3 / 3, 6.4e-3 / 3},
      {"640m", 1024, 639'797'248, 8, 24'406, 12'795'772'928, 2.0e-3, 1.6e-3},
  };
  // The reference's panel on 8 ranks, for a micro-batch of 4 in the golden file and of b here: one range a rank.
  const auto panels = golden::json("data_order.json")["panels"];
  const auto reference = std::ranges::find_if(panels, [](const auto& p) { return p["panel_tokens"] == 8192; });
  ASSERT_NE(reference, panels.end());
  for (const Scale& s : scales)
    for (const std::string head : {"adamw", "rownorm"}) {
      SCOPED_TRACE(s.name + "-" + head);
      const std::string file = std::string(ROWNORM_SOURCE) + "/configs/paper/" + s.name + "-" + head + ".json";
      const Config c = load_config(file, {}, 8);
      EXPECT_EQ(c.model.width, s.width);
      EXPECT_EQ(parameter_count(c.model), s.parameters);
      EXPECT_EQ(c.batch.micro_batch, s.micro_batch);
      EXPECT_EQ(c.updates(), s.updates);
      EXPECT_EQ(c.updates() * c.tokens_per_update(), s.tokens);
      EXPECT_EQ(c.warmup(), s.updates / 10);
      EXPECT_EQ(c.last_update(), s.updates);
      EXPECT_EQ(c.name, s.name + "-" + head + "-seed0");
      EXPECT_EQ(c.optimizer.head.lr, head == "adamw" ? s.adamw : s.rownorm);
      EXPECT_EQ(c.panel_positions(), 8192);
      std::vector<PositionRange> panel;
      for (const auto& rank : (*reference)["position_ranges_per_rank_half_open"]) {
        const std::int64_t begin = rank[0][0], end = rank[0][1];
        panel.emplace_back(begin / 4 * s.micro_batch, begin / 4 * s.micro_batch + end - begin);
      }
      EXPECT_EQ(c.diagnostics.hilbert_panel, panel);

      // Everything else is PAPER 4 and, apart from the head, the same in all of them.
      Json common = to_json(c);
      EXPECT_EQ(common["optimizer"]["head"]["algorithm"], head);
      common["optimizer"]["head"] = nullptr;
      common["model"]["width"] = common["batch"]["micro_batch"] = common["diagnostics"]["hilbert_panel"] = nullptr;
      common["name"] = common["output"] = nullptr;
      EXPECT_EQ(common, Json::parse(R"({
        "name": null, "seed": 0, "device": "auto", "precision": "auto", "recompute": "none",
        "model": { "vocab_size": 50257, "context": 2048, "layers": 32, "width": null, "head_dim": 64,
                   "mlp_ratio": 4, "rope_base": 10000, "norm_eps": 1e-6, "init_std": 0.02 },
        "data": { "train": "data/fineweb100B/fineweb_train_*.bin",
                  "validation": "data/fineweb100B/fineweb_val_*.bin" },
        "batch": { "sequences": 256, "micro_batch": null },
        "schedule": { "tokens_per_parameter": 20, "warmup_fraction": 0.1, "min_lr_ratio": 0.1, "max_updates": null },
        "clip_norm": 1.0,
        "optimizer": {
          "hidden": { "algorithm": "muon", "lr": 8e-3, "momentum": 0.95, "nesterov": true, "weight_decay": 0.1,
                      "newton_schulz_steps": 5, "newton_schulz_precision": "fp32", "eps": 1e-5 },
          "embedding": { "algorithm": "adamw", "lr": 4e-3, "betas": [0.9, 0.999], "eps": 1e-10, "weight_decay": 0.1 },
          "head": null },
        "evaluation": { "every": 500, "tokens": 5242880, "at_start": false },
        "diagnostics": { "diameter_every": 10, "hilbert_panel": null },
        "log_every": 10, "peak_tflops": null, "checkpoint": { "every": 1000, "keep": 2, "keep_updates": [] },
        "comm": { "timeout_seconds": 600 }, "debug": { "compare_ranks": false },
        "init_from": null, "output": null })"));
    }
}

TEST(QuickstartConfigs, DifferInTheHeadOnly) {
  const auto load = [](const std::string& head) {
    return to_json(load_config(std::string(ROWNORM_SOURCE) + "/configs/quickstart-" + head + ".json", {}));
  };
  const auto differences = differences_on_resume(load("adamw"), load("rownorm"));
  EXPECT_FALSE(differences.empty());
  for (const auto& line : differences) EXPECT_TRUE(line.starts_with("optimizer.head.")) << line;
}

TEST(Config, WarmupIsPythonsIntOfTheProduct) {
  const auto warmup = [](int updates, const std::string& fraction) {
    return parse({fmt::format("schedule.updates={}", updates), "schedule.warmup_fraction=" + fraction}).warmup();
  };
  // >>> int(10 * 0.1), int(29 * 0.1), int(100 * 0.29), int(1000 * 0.001), int(7 * (1 / 7))
  EXPECT_EQ(warmup(10, "0.1"), 1);
  EXPECT_EQ(warmup(29, "0.1"), 2);
  EXPECT_EQ(warmup(100, "0.29"), 28);  // 100 * 0.29 = 28.999999999999996
  EXPECT_EQ(warmup(1000, "0.001"), 1);
  EXPECT_EQ(warmup(7, "0.14285714285714285"), 1);
}

TEST(ModelConfig, FlopsCountEveryProductThreeTimes) {
  const ModelConfig m{.vocab_size = 10, .context = 5, .layers = 2, .width = 4, .head_dim = 2};
  EXPECT_EQ(parameter_count(m), 2 * 16 * 16 + 2 * 10 * 4);
  EXPECT_EQ(flops_per_token(m), 6 * (2 * 16 * 16 + 10 * 4) + 6 * 2 * 5 * 4);
}

}  // namespace
}  // namespace rownorm
