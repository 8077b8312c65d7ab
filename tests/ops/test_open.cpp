// Opening a backend by name: what is refused before any device is touched, and what a missing CUDA module says.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "base/expect_error.h"
#include "base/temporary_folder.h"
#include "ops/cuda_module.h"
#include "ops/open.h"

namespace rownorm {
namespace {

TEST(Open, UnknownNamesAreUsageErrorsThatListWhatIsAllowed) {
  for (const auto& open : {check_device_and_precision, +[](const std::string&device, const std::string&precision) {
                             open_backend(device, precision);
                           }}) {
    expect_error(Exit::usage, "[device] \"gpu\": unknown; one of auto, cpu, cuda, reference",
                 [&] { open("gpu", "auto"); });
    expect_error(Exit::usage, "[device] \"\"", [&] { open("", "auto"); });
    expect_error(Exit::usage, "[precision] \"fp16\": unknown; one of auto, bf16, tf32, fp32, fp64",
                 [&] { open("cpu", "fp16"); });
  }
}

TEST(Open, PrecisionsOfEachDevice) {
  const std::string precisions[] = {"auto", "bf16", "tf32", "fp32", "fp64"};
  const std::pair<std::string, std::string> allowed[] = {{"cpu", "auto fp32"},
                                                         {"reference", "auto fp64"},
                                                         {"cuda", "auto bf16 tf32 fp32"},
                                                         {"auto", "auto bf16 tf32 fp32"}};
  for (const auto& [device, list] : allowed)
    for (const auto& precision : precisions) {
      const auto check = [&, &d = device] { check_device_and_precision(d, precision); };
      if (list.find(precision) != std::string::npos)
        EXPECT_NO_THROW(check()) << device << " " << precision;
      else
        expect_error(Exit::usage, "[precision] " + precision, check);
    }
  expect_error(Exit::usage, "not on device cpu, which has auto, fp32",
               [] { check_device_and_precision("cpu", "bf16"); });
}

TEST(Open, ByName) {
  EXPECT_EQ(open_backend("cpu", "auto")->name(), "cpu");
  EXPECT_EQ(open_backend("cpu", "fp32")->name(), "cpu");
  EXPECT_EQ(open_backend("reference", "fp64")->name(), "reference");
}

// A test's executable has no module beside it.
TEST(Open, WithoutCuda) {
  expect_error(Exit::device, "librownorm_cuda.so: the module is not there", [] { open_backend("cuda", "auto"); });
  std::string no_cuda;
  EXPECT_EQ(open_backend("auto", "auto", 0, 1, &no_cuda)->name(), "cpu");
  EXPECT_NE(no_cuda.find("librownorm_cuda.so: the module is not there"), std::string::npos) << no_cuda;
  EXPECT_EQ(open_backend("auto", "fp32")->name(), "cpu");
  expect_error(Exit::usage, "[precision] bf16: not on device cpu, which has fp32; CUDA does not work here: [cuda]",
               [] { open_backend("auto", "bf16"); });
}

TEST(Open, ModuleThatCannotBeLoaded) {
  const std::filesystem::path path = std::filesystem::path(testing::TempDir()) / "rownorm_not_a_module.so";
  std::ofstream(path) << "text";
  expect_error(Exit::device, "[cuda] the module cannot be loaded: " + path.string(),
               [&] { open_cuda_module(path, "bf16", 0); });
  std::filesystem::remove(path);
}

TEST(Open, ModuleThatIsNoFile) {  // of a pipe, which nobody writes to, a read would wait for ever
  const TemporaryFolder folder;
  const std::filesystem::path pipe = folder / "librownorm_cuda.so";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  expect_error(Exit::device, pipe.string() + ": not a file", [&] { open_cuda_module(pipe, "bf16", 0); });
}

TEST(Open, ModuleOfSomethingElse) {
  Dl_info info{};
  ASSERT_NE(dladdr(reinterpret_cast<void*>(&std::terminate), &info), 0);  // any shared library: that of C++
  expect_error(Exit::device, "not a module of this program", [&] { open_cuda_module(info.dli_fname, "bf16", 0); });
}

TEST(Open, ModuleWithoutADeviceSaysWhy) {
  expect_error(Exit::device, "[cuda] no device 3 for tf32",
               [] { open_cuda_module(ROWNORM_FAKE_CUDA_MODULE, "tf32", 3); });
}

TEST(Open, AModuleThatIsCutOffIsNamed) {
  const std::filesystem::path whole = ROWNORM_FAKE_CUDA_MODULE;
  const TemporaryFolder folder;
  const std::filesystem::path part = folder / "librownorm_cuda.so";
  for (const std::uintmax_t size : {std::filesystem::file_size(whole) / 3, std::uintmax_t{200}, std::uintmax_t{64}}) {
    std::filesystem::copy_file(whole, part, std::filesystem::copy_options::overwrite_existing);
    std::filesystem::resize_file(part, size);
    expect_error(Exit::device, fmt::format("{}: is cut off at {} bytes", part.string(), size),
                 [&] { open_cuda_module(part, "fp32", 0); });
  }
}

}  // namespace
}  // namespace rownorm
