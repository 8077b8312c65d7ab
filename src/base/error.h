// Errors that end the program: one line for the user and an exit code (the contract is in README, "Exit codes").
#pragma once
#include <fmt/format.h>

#include <stdexcept>
#include <string>

namespace rownorm {

enum class Exit : int {
  ok = 0,
  internal = 1,  // a bug of ours
  usage = 2,     // command line or configuration
  data = 3,      // data, files, directories
  numbers = 4,   // a non-finite loss or gradient norm
  device = 5,    // device, memory or communication
};

class Error : public std::runtime_error {
 public:
  Error(Exit code, const std::string& message) : std::runtime_error(message), code_(code) {}
  Exit code() const { return code_; }

 private:
  Exit code_;
};

// Throws an Error. The message says what, where, which value, and what would be right:
//   fail(Exit::data, "[shard] {}: header says {} tokens, the file holds {} (truncated?)", path, said, held);
template <class... Args>
[[noreturn]] void fail(Exit code, fmt::format_string<Args...> format, Args&&... args) {
  throw Error(code, fmt::format(format, std::forward<Args>(args)...));
}

// Within a handler: the exception under way as an Error, whatever it is.
Error current_error();

}  // namespace rownorm
