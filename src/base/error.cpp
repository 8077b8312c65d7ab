#include "base/error.h"

#include <filesystem>
#include <new>
#include <system_error>

namespace rownorm {

Error current_error() {
  try {
    throw;
  } catch (const Error& e) {
    return e;
  } catch (const std::filesystem::filesystem_error& e) {  // a path that cannot even be looked at
    return {Exit::data, fmt::format("[file] {}: {}", e.path1().string(), e.code().message())};
  } catch (const std::system_error& e) {
    return {Exit::data, fmt::format("[system] {}", e.what())};
  } catch (const std::bad_alloc&) {
    return {Exit::device, "[memory] the host is out of memory"};
  } catch (const std::exception& e) {
    return {Exit::internal, fmt::format("[internal] {} (please report this)", e.what())};
  }
}

}  // namespace rownorm
