// Every operation only enqueues (ops/backend.h): the host never waits for the device in an update or a measurement,
// except where it reads. The stand-in's streams are lazy here and count how often the host waits for work.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <filesystem>

#include "base/temporary_folder.h"
#include "comm/comm.h"
#include "data/files.h"
#include "device.h"
#include "train/step.h"

namespace rownorm {
namespace {

const bool lazy = setenv("ROWNORM_STANDIN", "lazy", 1) == 0;  // before the module is loaded

std::size_t waits() {
  const auto module = std::filesystem::read_symlink("/proc/self/exe").parent_path() / "librownorm_cuda.so";
  void* handle = dlopen(module.c_str(), RTLD_NOW | RTLD_NOLOAD);
  return reinterpret_cast<std::size_t (*)()>(dlsym(handle, "standin_waits"))();
}

const char* const config_text = R"({
  "model": { "vocab_size": 7, "context": 4, "layers": 2, "width": 8, "head_dim": 4, "init_std": 0.3 },
  "data": { "train": "-", "validation": "-" },
  "batch": { "sequences": 1, "micro_batch": 1 },
  "schedule": { "updates": 9 }, "recompute": "block",
  "optimizer": { "hidden": { "algorithm": "muon", "lr": 0.01 }, "embedding": { "algorithm": "adamw", "lr": 0.01 },
                 "head": { "algorithm": "rownorm", "lr": 0.01, "projected": true } },
  "evaluation": { "tokens": 8 }, "diagnostics": { "hilbert_panel": [[0, 8]] },
  "output": "-"
})";

class Asynchrony : public ::testing::TestWithParam<const char*> {};

TEST_P(Asynchrony, TheHostWaitsOnlyWhereItReads) {
  ASSERT_TRUE(lazy);
  const Config config =
      parse_config(config_text, "test", {std::string("optimizer.hidden.newton_schulz_precision=") + GetParam()});
  const auto be = testing::open("cuda_bf16");
  const auto comm = make_single_process();
  TemporaryFolder folder;
  ShardSet shards("train", write_bytes(folder / "t.bin", shard_bytes({0, 1, 2, 3, 4, 5, 6, 0, 3})).string(), 7);
  // As many batches as the host may run ahead by (train/batch_reader.h).
  constexpr int updates = 2;
  BatchReader batches(*be, shards, TrainingOrder(0, {9}, 4, 1), config, 0, 1, 1, updates);
  Training t;
  const testing::Device device(*be, workspace_sizes(config), [&](Arena& arena) {
    t = make_training(arena, config, be->compute_dtype(), be->master_dtype(), 0, 0, 1);
  });
  be->fill(t.control.ok, 1);
  upload_rope(*be, t.activations, config.model);
  initialize(*be, t.master, config.model, config.seed);
  copy(*be, t.weights, t.master);
  be->read(t.control.ok);

  const std::size_t before = waits();
  for (int update = 1; update <= updates; ++update) {
    step(*be, *comm, config, t, batches, update, 1.0);
    be->row_diameter(t.diameter.distance, t.diameter.pair, t.optimizer.head_step);
    be->row_norms(t.diameter.norms, t.optimizer.head_step);
    collect(*be, t.panel, t.activations.hidden, 0);
    be->row_range(t.panel.lowest, t.panel.highest, t.panel.hidden, t.optimizer.head_step);
    be->mark();
  }
  EXPECT_EQ(waits(), before);
  EXPECT_EQ(be->read(t.control.ok), 1);
  EXPECT_EQ(waits(), before + 1);
}

INSTANTIATE_TEST_SUITE_P(Precisions, Asynchrony, ::testing::Values("fp32", "tf32", "bf16"),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace rownorm
