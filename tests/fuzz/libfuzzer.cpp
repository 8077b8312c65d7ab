// libFuzzer's entry. https://llvm.org/docs/LibFuzzer.html
#include <cstdint>

#include "reader.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace rownorm::fuzz;
  const std::span input(reinterpret_cast<const std::byte*>(data), size);
  if (accepts(input)) return 0;
  const std::string text = text_of(input), mended = repaired(text);
  if (mended != text) accepts(std::as_bytes(std::span(mended)));
  return 0;
}
