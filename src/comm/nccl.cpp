// Ranks over NCCL, which the CUDA module speaks: it is loaded already, as the backend came from it.
#include <dlfcn.h>

#include <array>
#include <cstddef>
#include <filesystem>
#include <stdexcept>

#include "comm/comm.h"

namespace rownorm {

std::unique_ptr<Comm> make_nccl(Comm& ranks, Backend& cuda, double timeout_seconds,
                                const std::function<void(const std::string&)>& report) {
  std::error_code error;
  const std::filesystem::path executable = std::filesystem::read_symlink("/proc/self/exe", error);
  void* module = dlopen((executable.parent_path() / "librownorm_cuda.so").c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  using Factory = Comm* (*)(Comm * ranks, Backend * backend, double timeout_seconds,
                            const std::function<void(const std::string&)>* report, char* message, std::size_t size);
  const auto factory = reinterpret_cast<Factory>(module ? dlsym(module, "rownorm_cuda_comm") : nullptr);
  if (!factory) throw std::logic_error("[nccl] the backend is not that of the CUDA module");
  std::array<char, 1024> message{};
  Comm* comm = factory(&ranks, &cuda, timeout_seconds, &report, message.data(), message.size());
  if (!comm) throw AgreedError(Exit::device, message.data());
  return std::unique_ptr<Comm>(comm);
}

}  // namespace rownorm
