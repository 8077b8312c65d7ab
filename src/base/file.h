// Files: memory-mapped reading, and writing that is whole or not there.
#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

namespace rownorm {

// Read-only mapping of a whole regular file. Empty files map to an empty span.
class MappedFile {
 public:
  // Error (exit 3), `[what] path: ...`, if it is missing, unreadable, or not a regular file.
  MappedFile(const std::string& what, const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(MappedFile&&) noexcept;
  MappedFile& operator=(MappedFile&&) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return {data_, size_}; }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

// From now on, touching a page of a mapped file that another program has cut off ends the process with exit 3 and one
// line that names the file, where it would have died of SIGBUS; of a library, exit 5.
void report_shortened_mappings();

// Buffered writer of one new file; Error (exit 3) with the path and the system's reason on any failure (disk full,
// file size limit, ...). close() syncs it to disk; a writer destroyed before close() removes the file.
class FileWriter {
 public:
  explicit FileWriter(const std::filesystem::path& path);  // truncates
  ~FileWriter();
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;
  void write(const void* data, std::size_t size);
  void close();

 private:
  std::filesystem::path path_;
  int fd_ = -1;
  std::string buffer_;
  void flush();
};

std::string read_text(const std::string& what, const std::filesystem::path& path);     // exit 3 on failure
void write_text_atomically(const std::filesystem::path& path, std::string_view text);  // beside, sync, rename, sync
void sync_directory(const std::filesystem::path& path);                                // exit 3 on failure
void rename_path(const std::filesystem::path& from, const std::filesystem::path& to);  // exit 3 on failure

// XXH3-128 of a span or of a whole file, 32 hexadecimal digits (the same as `xxhsum -H2`).
std::string digest(std::span<const std::byte> bytes);

}  // namespace rownorm
