#include "ops/open.h"

#include <dlfcn.h>
#include <elf.h>
#include <omp.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <vector>

#include "base/error.h"
#include "ops/cuda_module.h"

namespace rownorm {
namespace {

struct Device {
  std::string name;
  std::vector<std::string> precisions;  // the first is what auto means
};

const std::vector<Device>& devices() {
  static const std::vector<Device> all{{"cuda", {"bf16", "tf32", "fp32"}}, {"cpu", {"fp32"}}, {"reference", {"fp64"}}};
  return all;
}

bool has(const std::string& device, const std::string& precision) {
  const auto found =
      std::find_if(devices().begin(), devices().end(), [&](const Device& d) { return d.name == device; });
  return precision == "auto" ||
         std::find(found->precisions.begin(), found->precisions.end(), precision) != found->precisions.end();
}

// Of a library that ends before what it has loaded (its PT_LOAD segments) dlopen would die: SIGBUS. Whatever else is
// wrong with it dlopen says.
void require_whole(const std::filesystem::path& module) {
  std::error_code error;
  const std::uintmax_t size = std::filesystem::file_size(module, error);
  std::ifstream in(module, std::ios::binary);
  Elf64_Ehdr head{};
  if (error || !in.read(reinterpret_cast<char*>(&head), sizeof head) ||
      std::memcmp(head.e_ident, ELFMAG, SELFMAG) != 0 || head.e_phentsize != sizeof(Elf64_Phdr))
    return;
  in.seekg(static_cast<std::streamoff>(head.e_phoff));
  for (int i = 0; i < head.e_phnum; ++i) {
    Elf64_Phdr part{};
    const bool read = static_cast<bool>(in.read(reinterpret_cast<char*>(&part), sizeof part));
    if (!read || (part.p_type == PT_LOAD && (part.p_offset > size || part.p_filesz > size - part.p_offset)))
      fail(Exit::device, "[cuda] {}: is cut off at {} bytes; build or copy it again", module.string(), size);
  }
}

// The module is found beside the executable.
std::unique_ptr<Backend> open_cuda(const std::string& precision, int local_rank) {
  std::error_code error;
  const std::filesystem::path executable = std::filesystem::read_symlink("/proc/self/exe", error);
  return open_cuda_module(executable.parent_path() / "librownorm_cuda.so", precision == "auto" ? "bf16" : precision,
                          local_rank);
}

}  // namespace

std::unique_ptr<Backend> open_cuda_module(const std::filesystem::path& module, const std::string& precision,
                                          int local_rank) {
  if (!std::filesystem::exists(module)) fail(Exit::device, "[cuda] {}: the module is not there", module.string());
  if (!std::filesystem::is_regular_file(module))
    fail(Exit::device, "[cuda] {}: not a file; build or copy the module again", module.string());
  require_whole(module);
  void* library = dlopen(module.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) fail(Exit::device, "[cuda] the module cannot be loaded: {}", dlerror());
  const auto abi = reinterpret_cast<int (*)()>(dlsym(library, "rownorm_cuda_abi"));
  if (abi && abi() != cuda_module_abi)
    fail(Exit::device, "[cuda] {}: is of another build: interface {}, expected {}", module.string(), abi(),
         cuda_module_abi);
  using Factory = Backend* (*)(const char* precision, int local_rank, char* message, std::size_t size);
  const auto factory = reinterpret_cast<Factory>(dlsym(library, "rownorm_cuda_backend"));
  if (!abi || !factory) fail(Exit::device, "[cuda] {}: not a module of this program", module.string());
  std::array<char, 1024> message{};
  Backend* backend = factory(precision.c_str(), local_rank, message.data(), message.size());
  if (!backend) fail(Exit::device, "[cuda] {}", message.data());
  return std::unique_ptr<Backend>(backend);
}

void check_device_and_precision(const std::string& device, const std::string& precision) {
  if (device != "auto" && device != "cpu" && device != "cuda" && device != "reference")
    fail(Exit::usage, "[device] \"{}\": unknown; one of auto, cpu, cuda, reference", device);
  const std::array known{"auto", "bf16", "tf32", "fp32", "fp64"};
  if (std::find(known.begin(), known.end(), precision) == known.end())
    fail(Exit::usage, "[precision] \"{}\": unknown; one of auto, bf16, tf32, fp32, fp64", precision);
  if (device == "auto") {  // CUDA or the CPU
    if (!has("cuda", precision) && !has("cpu", precision))
      fail(Exit::usage, "[precision] {}: only device reference has it; with device auto: auto, bf16, tf32, fp32",
           precision);
  } else if (!has(device, precision)) {
    const char* allowed = device == "cuda" ? "auto, bf16, tf32, fp32" : device == "cpu" ? "auto, fp32" : "auto, fp64";
    fail(Exit::usage, "[precision] {}: not on device {}, which has {}", precision, device, allowed);
  }
}

std::unique_ptr<Backend> open_backend(const std::string& device, const std::string& precision, int local_rank,
                                      int local_size, std::string* no_cuda) {
  check_device_and_precision(device, precision);
  if (local_size > 1 && !std::getenv("OMP_NUM_THREADS"))
    omp_set_num_threads(std::max(1, omp_get_num_procs() / local_size));
  if (device == "reference") return make_reference_backend(local_size);
  if (device == "cpu") return make_cpu_backend(local_size);
  if (device == "cuda") return open_cuda(precision, local_rank);
  try {
    return open_cuda(precision, local_rank);
  } catch (const Error& error) {
    if (!has("cpu", precision))
      fail(Exit::usage, "[precision] {}: not on device cpu, which has fp32; CUDA does not work here: {}", precision,
           error.what());
    if (no_cuda) *no_cuda = error.what();
    return make_cpu_backend(local_size);
  }
}

}  // namespace rownorm
