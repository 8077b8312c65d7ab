#include "base/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#define XXH_VECTOR XXH_SCALAR  // its AVX-512 code trips g++ 12's -Wmaybe-uninitialized; 8 GB/s will do
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <system_error>
#include <utility>

#include "base/error.h"

namespace rownorm {

namespace {

constexpr std::size_t buffer_bytes = std::size_t{1} << 20;

std::string reason(int error) { return std::generic_category().message(error); }

// An open file descriptor, closed at the end of its scope.
struct Descriptor {
  int fd;
  explicit Descriptor(int opened) : fd(opened) {}
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
};

// Opens a regular file for reading and returns its descriptor. O_NONBLOCK: opening a pipe returns at once and is
// refused.
int open_regular(const std::string& what, const std::filesystem::path& path, struct stat& status) {
  Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  const int error = errno;
  if (file.fd < 0 && error == ENOENT) fail(Exit::data, "[{}] {}: no such file", what, path.string());
  if (file.fd < 0 && error != ENXIO) fail(Exit::data, "[{}] {}: cannot read: {}", what, path.string(), reason(error));
  if (file.fd >= 0 && ::fstat(file.fd, &status) != 0)
    fail(Exit::data, "[{}] {}: cannot read: {}", what, path.string(), reason(errno));
  if (file.fd >= 0 && S_ISDIR(status.st_mode))
    fail(Exit::data, "[{}] {}: is a folder, expected a file", what, path.string());
  if (file.fd < 0 || !S_ISREG(status.st_mode))  // ENXIO: a socket
    fail(Exit::data, "[{}] {}: is a pipe, socket or device, expected a regular file", what, path.string());
  return std::exchange(file.fd, -1);
}

int sync_descriptor(int fd) {
  int result;
  do result = ::fsync(fd);
  while (result != 0 && errno == EINTR);
  return result;
}

// Runs inside a signal handler, on a process that is about to end: nothing here allocates. A bus error of another kind
// (si_code) is left to end the process as ever; so is a second one, of another thread.
// /proc/self/maps has a line a mapping, "from-to permissions offset device inode path".
extern "C" void on_bus_error(int, siginfo_t* info, void*) {
  struct sigaction as_ever {};
  as_ever.sa_handler = SIG_DFL;
  ::sigaction(SIGBUS, &as_ever, nullptr);
  if (info->si_code != BUS_ADRERR) return;  // to the instruction that raises it again
  static char line[PATH_MAX + 128];
  const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
  const char* path = nullptr;
  const int maps = ::open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
  std::size_t length = 0;
  for (char byte = 0; !path && ::read(maps, &byte, 1) == 1;) {
    if (byte != '\n') {
      if (length + 1 < sizeof line) line[length++] = byte;
      continue;
    }
    line[std::exchange(length, 0)] = '\0';
    char* end = nullptr;
    const std::uintptr_t from = ::strtoull(line, &end, 16), to = ::strtoull(end + 1, nullptr, 16);
    if (from <= address && address < to) path = ::strchr(line, '/');
  }
  const char* suffix = path ? ::strstr(::strrchr(path, '/'), ".so") : nullptr;  // of a library; else a file of tokens
  const bool library = suffix && (suffix[3] == '\0' || suffix[3] == '.');
  static char message[PATH_MAX + 128];
  const int size =
      ::snprintf(message, sizeof message,
                 library ? "[library] %s: is cut off, or cannot be read; install it again\n"
                         : "[file] %s: became shorter while in use, or cannot be read; restore it and resume\n",
                 path ? path : "a mapped file");
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, message, static_cast<std::size_t>(size));
  ::_exit(static_cast<int>(library ? Exit::device : Exit::data));
}

}  // namespace

void report_shortened_mappings() {
  struct sigaction action {};
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO;
  ::sigaction(SIGBUS, &action, nullptr);
}

MappedFile::MappedFile(const std::string& what, const std::filesystem::path& path) : path_(path) {
  struct stat status {};
  Descriptor file(open_regular(what, path, status));
  if (status.st_size == 0) return;
  size_ = static_cast<std::size_t>(status.st_size);
  void* mapped = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file.fd, 0);
  if (mapped == MAP_FAILED) fail(Exit::data, "[{}] {}: cannot map: {}", what, path.string(), reason(errno));
  data_ = static_cast<const std::byte*>(mapped);
}

MappedFile::~MappedFile() {
  if (data_) ::munmap(const_cast<std::byte*>(data_), size_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, std::size_t{0})) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

FileWriter::FileWriter(const std::filesystem::path& path) : path_(path) {
  // O_NONBLOCK: a pipe without a reader is an error, not a wait.
  Descriptor file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NONBLOCK, 0666));
  if (file.fd < 0) fail(Exit::data, "[file] {}: cannot create: {}", path.string(), reason(errno));
  struct stat status {};
  // Only what may be removed after a failure is written to: never a device or a pipe.
  if (::fstat(file.fd, &status) != 0 || !S_ISREG(status.st_mode))
    fail(Exit::data, "[file] {}: cannot create: is a pipe or device, expected a regular file", path.string());
  buffer_.reserve(buffer_bytes);
  fd_ = std::exchange(file.fd, -1);
}

FileWriter::~FileWriter() {
  if (fd_ < 0) return;
  ::close(fd_);
  ::unlink(path_.c_str());
}

void FileWriter::write(const void* data, std::size_t size) {
  const char* bytes = static_cast<const char*>(data);
  while (size > 0) {
    const std::size_t part = std::min(size, buffer_bytes - buffer_.size());
    buffer_.append(bytes, part);
    bytes += part;
    size -= part;
    if (buffer_.size() == buffer_bytes) flush();
  }
}

void FileWriter::flush() {
  std::size_t done = 0;
  while (done < buffer_.size()) {
    const ssize_t written = ::write(fd_, buffer_.data() + done, buffer_.size() - done);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail(Exit::data, "[file] {}: cannot write: {}", path_.string(), reason(errno));
    done += static_cast<std::size_t>(written);
  }
  buffer_.clear();
}

void FileWriter::close() {
  flush();
  if (sync_descriptor(fd_) != 0) fail(Exit::data, "[file] {}: cannot sync: {}", path_.string(), reason(errno));
  if (::close(std::exchange(fd_, -1)) != 0 && errno != EINTR) {  // interrupted: closed, and synced before
    const int error = errno;
    ::unlink(path_.c_str());
    fail(Exit::data, "[file] {}: cannot close: {}", path_.string(), reason(error));
  }
}

// Reads to the end instead of to the size, so that files of /proc, whose size is 0, are read whole.
std::string read_text(const std::string& what, const std::filesystem::path& path) {
  struct stat status {};
  Descriptor file(open_regular(what, path, status));
  std::string text;
  for (;;) {
    char part[1 << 14];
    const ssize_t got = ::read(file.fd, part, sizeof part);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail(Exit::data, "[{}] {}: cannot read: {}", what, path.string(), reason(errno));
    if (got == 0) return text;
    text.append(part, static_cast<std::size_t>(got));
  }
}

void write_text_atomically(const std::filesystem::path& path, std::string_view text) {
  std::filesystem::path beside = path;
  beside += ".partial";
  FileWriter file(beside);
  file.write(text.data(), text.size());
  file.close();
  try {
    rename_path(beside, path);
  } catch (const Error&) {
    ::unlink(beside.c_str());
    throw;
  }
  sync_directory(path.parent_path());
}

void sync_directory(const std::filesystem::path& path) {
  const std::filesystem::path folder = path.empty() ? "." : path;
  Descriptor file(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  // EINVAL: a file system that has no syncing of folders.
  if (file.fd < 0 || (sync_descriptor(file.fd) != 0 && errno != EINVAL))
    fail(Exit::data, "[file] {}: cannot sync the folder: {}", folder.string(), reason(errno));
}

void rename_path(const std::filesystem::path& from, const std::filesystem::path& to) {
  if (::rename(from.c_str(), to.c_str()) != 0)
    fail(Exit::data, "[file] {}: cannot rename to {}: {}", from.string(), to.string(), reason(errno));
}

std::string digest(std::span<const std::byte> bytes) {
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

}  // namespace rownorm
