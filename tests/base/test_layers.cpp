// Who may include whom. This table is the rule, and the rooms are described in the README.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace rownorm {
namespace {

// Room -> rooms whose headers it may include, beside its own.
const std::map<std::string, std::set<std::string>> allowed{
    {"base", {}},
    {"ops", {"base"}},
    {"comm", {"base"}},
    {"data", {"base"}},
    {"model", {"ops", "base"}},
    {"optim", {"model", "ops", "comm", "base"}},
    {"geometry", {"model", "ops", "comm", "base"}},
    {"train", {"optim", "geometry", "model", "data", "ops", "comm", "base"}},
    {"cmd", {"train", "optim", "geometry", "model", "data", "ops", "comm", "base"}},
    {"cuda", {"base"}},  // and the headers below
};
const std::set<std::string> cuda_contracts{"ops/backend.h", "ops/cuda_module.h", "ops/cuda_plan.h", "comm/comm.h"};

// Folders below a room.
const std::set<std::string> folders{"src/ops/cpu", "src/ops/reference"};

// Headers of libraries that belong to one place each: what begins so may be included only where the path begins so.
const std::vector<std::pair<std::vector<std::string>, std::vector<std::string>>> libraries{
    {{"CLI/"}, {"src/cmd/", "src/main.cpp"}},
    {{"mpi.h"}, {"src/comm/"}},
    {{"cuda", "cublas", "curand", "cudnn", "cutlass/", "cute/", "cub/", "thrust/", "nccl", "nvtx", "nvml", "mma.h",
      "cooperative_groups"},
     {"cuda/"}},
    {{"cblas.h", "f77blas.h", "lapack", "openblas"}, {"src/ops/cpu/"}},
};

bool begins_with_any(const std::string& text, const std::vector<std::string>& beginnings) {
  return std::any_of(beginnings.begin(), beginnings.end(), [&](const std::string& b) { return text.starts_with(b); });
}

// The header of an include line with its opening quote, `"base/file.h` or `<vector`; empty for any other line.
std::string included(const std::string& line) {
  const std::string blank = " \t";
  std::size_t at = line.find_first_not_of(blank);
  for (const std::string word : {"#", "include"}) {
    if (at == std::string::npos || line.compare(at, word.size(), word) != 0) return "";
    at = line.find_first_not_of(blank, at + word.size());
  }
  if (at == std::string::npos || (line[at] != '"' && line[at] != '<')) return "";
  const std::size_t end = line.find(line[at] == '"' ? '"' : '>', at + 1);
  return line.substr(at, end == std::string::npos ? end : end - at);
}

// What is wrong with a source file, `path` relative to the repository: one line each.
std::vector<std::string> violations(const std::string& path, const std::string& text) {
  std::vector<std::string> parts;  // of the path
  std::istringstream path_stream(path);
  for (std::string part; std::getline(path_stream, part, '/');) parts.push_back(part);
  std::string room = parts[0];
  if (room == "src") room = path == "src/main.cpp" ? "cmd" : parts.size() > 2 && parts[1] != "cuda" ? parts[1] : "";
  if (!allowed.contains(room)) return {path + ": is in no room of the table"};
  std::vector<std::string> found;
  const std::size_t depth = parts.size() - (room == "cuda" ? 2 : 3);
  if (path != "src/main.cpp" && depth > 0 && !folders.contains(path.substr(0, path.rfind('/'))))
    found.push_back(path + ": is more than one level deep");

  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::string header = included(line);
    if (header.empty()) continue;
    const bool quoted = header[0] == '"';
    header.erase(0, 1);
    const std::size_t slash = header.find('/');
    const std::string owner = slash == std::string::npos ? "" : header.substr(0, slash);
    const auto add = [&](const std::string& what) { found.push_back(path + ": includes " + header + what); };
    if (allowed.contains(owner) && (quoted || owner != "cuda")) {  // <cuda/...> is NVIDIA's library
      if (!quoted) add(" like a library's, expected quotes");
      if (owner != room && !allowed.at(room).contains(owner) && !(room == "cuda" && cuda_contracts.contains(header)))
        add(", which " + room + " may not");
      continue;
    }
    for (const auto& [library, places] : libraries)
      if (begins_with_any(header, library) && !begins_with_any(path, places)) add(", which belongs elsewhere");
    if (quoted) add(", expected \"room/file.h\" or a library's <header>");
  }
  return found;
}

TEST(Layers, EveryFileKeepsToTheTable) {
  const std::filesystem::path root = ROWNORM_SOURCE;
  int files = 0;
  for (const char* part : {"src", "cuda"}) {
    if (!std::filesystem::exists(root / part)) continue;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(root / part)) {
      const std::string extension = entry.path().extension().string();
      if (!std::set<std::string>{".h", ".cpp", ".cu", ".cuh"}.contains(extension)) continue;
      std::ifstream in(entry.path());
      const std::string text{std::istreambuf_iterator<char>(in), {}};
      for (const std::string& line : violations(std::filesystem::relative(entry.path(), root).generic_string(), text))
        ADD_FAILURE() << line;
      EXPECT_NE(text, "") << entry.path();
      ++files;
    }
  }
  EXPECT_GT(files, 11);  // those of base alone
}

TEST(Layers, WhatIsAllowedPasses) {
  const auto fine = [](const std::string& path, const std::string& text) {
    EXPECT_EQ(violations(path, text), std::vector<std::string>{});
  };
  fine("src/base/file.cpp", "#include \"base/file.h\"\n#include <vector>\n#include <nlohmann/json.hpp>\n");
  fine("src/ops/cpu/attention.cpp", "#include \"ops/cpu/cpu_backend.h\"\n#include <cblas.h>\n#include <omp.h>\n");
  fine("src/ops/cuda_module.cpp", "#include <dlfcn.h>\n#include \"ops/cuda_module.h\"\n");
  fine("src/comm/mpi.cpp", "#include <mpi.h>\n");
  fine("src/optim/muon.h", "#include \"model/parameters.h\"\n#include \"comm/comm.h\"\n");
  fine("src/train/step.cpp",
       "#include \"optim/muon.h\"\n#include \"geometry/diameter.h\"\n#include \"data/order.h\"\n");
  fine("src/cmd/train.cpp", "#include <CLI/CLI.hpp>\n#include \"train/config.h\"\n");
  fine("src/main.cpp", "#include <CLI/CLI.hpp>\n#include \"cmd/commands.h\"\n");
  fine("cuda/backend.cu", "#include <cublasLt.h>\n#include \"cuda/attention.cuh\"\n#include \"ops/backend.h\"\n");
  fine("cuda/communicator.cpp", "#include <nccl.h>\n#include \"comm/comm.h\"\n#include \"base/error.h\"\n");
  fine("src/model/config.cpp", "// see #include \"cmd/commands.h\"\n");
}

TEST(Layers, PlantedViolationsAreFound) {
  const struct {
    std::string path, text, message;
  } planted[] = {
      {"src/base/file.cpp", "#include \"ops/backend.h\"\n", "ops/backend.h, which base may not"},
      {"src/base/file.cpp", "\n  #  include \"train/config.h\"\n", "train/config.h, which base may not"},
      {"src/ops/cpu/x.cpp", "#include \"model/config.h\"\n", "which ops may not"},
      {"src/comm/mpi.cpp", "#include \"ops/backend.h\"\n", "which comm may not"},
      {"src/data/order.h", "#include \"comm/comm.h\"\n", "which data may not"},
      {"src/model/transformer.cpp", "#include \"comm/comm.h\"\n", "which model may not"},
      {"src/optim/muon.cpp", "#include \"geometry/diameter.h\"\n", "which optim may not"},
      {"src/optim/muon.cpp", "#include \"data/order.h\"\n", "which optim may not"},
      {"src/geometry/hilbert.cpp", "#include \"train/config.h\"\n", "which geometry may not"},
      {"src/train/step.cpp", "#include \"cmd/commands.h\"\n", "which train may not"},
      {"src/train/step.cpp", "#include \"cuda/backend.cuh\"\n", "which train may not"},
      {"src/ops/open.cpp", "#include \"cuda/backend.h\"\n", "which ops may not"},
      {"src/cmd/train.cpp", "#include \"cuda/backend.h\"\n", "which cmd may not"},
      {"cuda/backend.cu", "#include \"ops/open.h\"\n", "which cuda may not"},
      {"cuda/backend.cu", "#include \"model/config.h\"\n", "which cuda may not"},
      {"src/train/config.cpp", "#include <CLI/CLI.hpp>\n", "CLI/CLI.hpp, which belongs elsewhere"},
      {"src/ops/open.cpp", "#include <cuda_runtime.h>\n", "belongs elsewhere"},
      {"src/ops/open.cpp", "#include <cuda/std/array>\n", "belongs elsewhere"},
      {"src/ops/cpu/linear.cpp", "#include <cublas_v2.h>\n", "belongs elsewhere"},
      {"src/comm/single.cpp", "#include <nccl.h>\n", "belongs elsewhere"},
      {"src/cmd/train.cpp", "#include <mpi.h>\n", "belongs elsewhere"},
      {"cuda/communicator.cpp", "#include \"mpi.h\"\n", "belongs elsewhere"},
      {"src/model/transformer.cpp", "#include <cblas.h>\n", "belongs elsewhere"},
      {"src/base/file.cpp", "#include \"file.h\"\n", "expected \"room/file.h\""},
      {"src/base/file.cpp", "#include \"../ops/backend.h\"\n", "expected \"room/file.h\""},
      {"src/base/file.cpp", "#include <ops/backend.h>\n", "like a library's"},
      {"src/utils/x.cpp", "", "is in no room"},
      {"src/cuda/x.cpp", "", "is in no room"},
      {"src/x.cpp", "", "is in no room"},
      {"src/optim/muon/x.cpp", "", "more than one level deep"},
      {"src/ops/cpu/avx/x.cpp", "", "more than one level deep"},
      {"cuda/kernels/old/x.cu", "", "more than one level deep"},
  };
  for (const auto& p : planted) {
    const auto found = violations(p.path, p.text);
    ASSERT_FALSE(found.empty()) << p.path << ": " << p.text;
    EXPECT_NE(found.front().find(p.message), std::string::npos) << found.front();
  }
}

}  // namespace
}  // namespace rownorm
