// The safetensors format: 8-byte little-endian header length, JSON header {name: {dtype, shape, data_offsets}}, then
// raw little-endian row-major data. https://huggingface.co/docs/safetensors
#pragma once
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/tensor.h"

namespace rownorm {

// Memory-mapped reader. Nothing in the file is trusted: lengths, offsets, shapes, overlaps, holes, duplicate names and
// dtypes are checked before any use. Error (exit 3) with file, tensor and value.
class SafetensorsFile {
 public:
  struct Entry {
    std::string dtype;                // as written: "F64", "F32", "BF16", "F16", "I32", ...
    std::vector<std::int64_t> shape;  // any rank
    std::span<const std::byte> data;  // size = product of shape * element size, may be unaligned
    std::int64_t elements() const;
  };

  explicit SafetensorsFile(const std::filesystem::path& path);
  // The same over bytes in memory that outlive it; `name` stands for the path in messages.
  SafetensorsFile(std::span<const std::byte> bytes, const std::filesystem::path& name);
  const std::filesystem::path& path() const { return path_; }
  const std::map<std::string, Entry>& entries() const { return entries_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  bool contains(const std::string& name) const { return entries_.contains(name); }
  const Entry& at(const std::string& name) const;  // exit 3, naming the file and the tensor, when missing

  // Converts tensor `name` (F64, F32, F16, BF16 or I32) to the host tensor's dtype (f64, f32 or i32; floats
  // only from floats); the shape must be equal: exit 3 with expected and actual. Returns true if all were finite.
  bool read(const std::string& name, Tensor host) const;
  // The same for elements [first, first + host.size()) in row-major order, whatever the host tensor's shape.
  bool read(const std::string& name, Tensor host, std::int64_t first) const;

 private:
  std::optional<MappedFile> file_;
  std::filesystem::path path_;
  std::map<std::string, Entry> entries_;
  std::map<std::string, std::string> metadata_;
};

// Streams tensors to a file in the order in which they were declared; the header goes first, so names and shapes are
// declared before any data. No timestamps: same content, same bytes. (Not atomic alone: write beside and rename.)
class SafetensorsWriter {
 public:
  struct Declaration {
    std::string name;
    DType dtype;  // f64, f32, bf16, i32
    std::vector<std::int64_t> shape;
  };
  // `metadata` becomes the header's __metadata__.
  SafetensorsWriter(const std::filesystem::path& path, const std::vector<Declaration>& tensors,
                    const std::map<std::string, std::string>& metadata = {});
  void write(const void* data, std::size_t bytes);  // the next part of the data, in order of declaration
  void close();                                     // std::logic_error if fewer or more bytes came than declared

 private:
  FileWriter file_;
  std::int64_t expected_ = 0, written_ = 0;
};

}  // namespace rownorm
