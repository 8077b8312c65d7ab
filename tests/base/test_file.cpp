#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/expect_error.h"
#include "base/file.h"
#include "base/temporary_folder.h"

// The system calls that a disk can fail. This program's definitions come before the C library's; each makes the real
// call unless a test asked for a fault.
namespace {

struct Faults {
  long write_limit = -1;     // bytes until the disk is full; -1: never
  bool write_short = false;  // every second write is interrupted, the others take at most 1000 bytes
  int fsync_error = 0, close_error = 0;
  int writes = 0;
} faults;

}  // namespace

extern "C" ssize_t write(int fd, const void* data, size_t size) {
  if (faults.write_short) {
    if (++faults.writes % 2 == 0) {
      errno = EINTR;
      return -1;
    }
    size = std::min<size_t>(size, 1000);
  }
  if (faults.write_limit == 0) {
    errno = ENOSPC;
    return -1;
  }
  if (faults.write_limit > 0) size = std::min(size, static_cast<size_t>(faults.write_limit));
  const auto written = static_cast<ssize_t>(::syscall(SYS_write, fd, data, size));
  if (faults.write_limit > 0 && written > 0) faults.write_limit -= written;
  return written;
}

extern "C" int fsync(int fd) {
  if (faults.fsync_error == 0) return static_cast<int>(::syscall(SYS_fsync, fd));
  errno = faults.fsync_error;
  return -1;
}

extern "C" int close(int fd) {
  const auto result = static_cast<int>(::syscall(SYS_close, fd));
  if (faults.close_error == 0) return result;
  errno = faults.close_error;
  return -1;
}

namespace rownorm {
namespace {

struct Files : testing::Test {
  TemporaryFolder folder;

  void SetUp() override { faults = {}; }
  void TearDown() override { faults = {}; }
  std::filesystem::path with(const std::string& name, const std::string& text) const {
    std::ofstream(folder / name, std::ios::binary) << text;
    return folder / name;
  }
};

std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// Longer than the writer's buffer, and not a multiple of anything.
std::string long_text() {
  std::string text(3'333'333, '\0');
  for (std::size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(i * i % 251);
  return text;
}

TEST_F(Files, MapsAWholeFile) {
  const std::string text("a\0b\xff\n", 5);
  MappedFile file("data", with("x", text));
  EXPECT_EQ(text_of(file.bytes()), text);
  EXPECT_EQ(file.path(), folder / "x");
}

TEST_F(Files, MapsAnEmptyFile) { EXPECT_TRUE(MappedFile("data", with("x", "")).bytes().empty()); }

TEST_F(Files, MovingKeepsTheMapping) {
  MappedFile a("data", with("a", "first")), b("data", with("b", "second"));
  const std::byte* where = a.bytes().data();
  MappedFile moved(std::move(a));
  EXPECT_EQ(moved.bytes().data(), where);
  b = std::move(moved);
  EXPECT_EQ(text_of(b.bytes()), "first");
  EXPECT_EQ(b.path(), folder / "a");
}

TEST_F(Files, WhatCannotBeMappedIsSaidClearly) {
  expect_error(Exit::data, "[shard] " + (folder / "none").string() + ": no such file",
               [&] { MappedFile("shard", folder / "none"); });
  expect_error(Exit::data, "[shard] " + folder.path.string() + ": is a folder, expected a file",
               [&] { MappedFile("shard", folder.path); });
  const auto file = with("x", "text");
  expect_error(Exit::data, "cannot read: Not a directory", [&] { MappedFile("shard", file / "y"); });
  expect_error(Exit::data, "cannot read: File name too long", [&] { MappedFile("shard", std::string(5000, 'x')); });
  std::filesystem::create_symlink("loop", folder / "loop");
  expect_error(Exit::data, "cannot read: Too many levels of symbolic links",
               [&] { MappedFile("shard", folder / "loop"); });
  expect_error(Exit::data, "[shard] /dev/null: is a pipe, socket or device", [] { MappedFile("shard", "/dev/null"); });
}

TEST_F(Files, APipeOrSocketIsRefusedAtOnce) {
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  expect_error(Exit::data, "is a pipe, socket or device", [&] { MappedFile("shard", folder / "pipe"); });
  expect_error(Exit::data, "is a pipe, socket or device", [&] { read_text("config", folder / "pipe"); });
  expect_error(Exit::data, "cannot create", [&] { FileWriter(folder / "pipe"); });
  EXPECT_TRUE(std::filesystem::exists(folder / "pipe"));

  const int fd = ::socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, (folder / "socket").c_str(), sizeof address.sun_path - 1);
  ASSERT_EQ(::bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  expect_error(Exit::data, "is a pipe, socket or device", [&] { MappedFile("shard", folder / "socket"); });
  ::close(fd);
}

TEST_F(Files, AnUnreadableFileIsSaidSo) {
  const auto file = with("x", "text");
  std::filesystem::permissions(file, std::filesystem::perms::none);
  // Root reads everything, so it takes off that right for the length of the test.
  const uid_t user = ::geteuid();
  std::filesystem::permissions(folder.path, std::filesystem::perms::all);
  if (user == 0) {
    ASSERT_EQ(::seteuid(65534), 0);
  }
  expect_error(Exit::data, "cannot read: Permission denied", [&] { MappedFile("shard", file); });
  expect_error(Exit::data, "cannot read: Permission denied", [&] { read_text("config", file); });
  expect_error(Exit::data, "cannot create: Permission denied", [&] { FileWriter{file}; });
  ASSERT_EQ(::seteuid(user), 0);
}

TEST_F(Files, WritesWhatItWasGiven) {
  const std::string text = long_text();
  FileWriter file(folder / "x");
  std::size_t at = 0;
  for (std::size_t size = 1; at < text.size(); size = size * 3 + 1) {
    const std::size_t part = std::min(size, text.size() - at);
    file.write(text.data() + at, part);
    at += part;
  }
  file.close();
  EXPECT_EQ(read_text("x", folder / "x"), text);
}

TEST_F(Files, WritesThroughInterruptionsAndShortWrites) {
  const std::string text = long_text();
  faults.write_short = true;
  FileWriter file(folder / "x");
  file.write(text.data(), text.size());
  file.close();
  faults = {};
  EXPECT_EQ(read_text("x", folder / "x"), text);
}

TEST_F(Files, AnUnfinishedFileIsRemoved) {
  {
    FileWriter file(folder / "x");
    file.write("text", 4);
    EXPECT_FALSE(folder.empty());
  }
  EXPECT_TRUE(folder.empty());
}

TEST_F(Files, AFullDiskLeavesNothing) {
  const std::string text = long_text();
  for (const long limit : {0L, 1L, 1'000'000L, 1'048'576L, 3'333'332L}) {
    faults.write_limit = limit;
    expect_error(Exit::data, "[file] " + (folder / "x").string() + ": cannot write: No space left on device", [&] {
      FileWriter file(folder / "x");
      file.write(text.data(), text.size());
      file.close();
    });
    EXPECT_TRUE(folder.empty()) << limit;
  }
  faults.write_limit = 10;
  expect_error(Exit::data, "No space left on device", [&] { write_text_atomically(folder / "x", "more than ten"); });
  EXPECT_TRUE(folder.empty());
}

TEST_F(Files, TheLimitOnFileSizesLeavesNothing) {
  const std::string text = long_text();
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit limit = before;
  limit.rlim_cur = 1'500'000;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  expect_error(Exit::data, "cannot write: File too large", [&] {
    FileWriter file(folder / "x");
    file.write(text.data(), text.size());
    file.close();
  });
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_TRUE(folder.empty());
}

TEST_F(Files, AFailureToSyncOrCloseLeavesNothing) {
  const auto write = [&] {
    FileWriter file(folder / "x");
    file.write("text", 4);
    file.close();
  };
  faults.fsync_error = EIO;
  expect_error(Exit::data, "cannot sync: Input/output error", write);
  EXPECT_TRUE(folder.empty());
  faults = {};
  faults.close_error = EDQUOT;
  expect_error(Exit::data, "cannot close: Disk quota exceeded", write);
  EXPECT_TRUE(folder.empty());
}

TEST_F(Files, WhatCannotBeCreatedIsSaidClearly) {
  expect_error(Exit::data, "cannot create: No such file or directory", [&] { FileWriter(folder / "none/x"); });
  expect_error(Exit::data, "cannot create: Is a directory", [&] { FileWriter{folder.path}; });
  expect_error(Exit::data, "expected a regular file", [] { FileWriter("/dev/null"); });
  EXPECT_TRUE(std::filesystem::exists("/dev/null"));
}

TEST_F(Files, ReadsText) {
  EXPECT_EQ(read_text("x", with("x", long_text())), long_text());
  EXPECT_EQ(read_text("x", with("empty", "")), "");
  EXPECT_FALSE(read_text("x", "/proc/self/status").empty());  // claims a size of 0
  expect_error(Exit::data, "[config] " + (folder / "none").string() + ": no such file",
               [&] { read_text("config", folder / "none"); });
  expect_error(Exit::data, "is a folder", [&] { read_text("config", folder.path); });
}

TEST_F(Files, TextIsReplacedWhole) {
  const auto path = with("x", "old and longer");
  write_text_atomically(path, "new");
  EXPECT_EQ(read_text("x", path), "new");
  faults.write_limit = 1;
  expect_error(Exit::data, "cannot write", [&] { write_text_atomically(path, "newer"); });
  faults = {};
  EXPECT_EQ(read_text("x", path), "new");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path), {}), 1);

  std::filesystem::create_directories(folder / "full/inside");
  expect_error(Exit::data, "cannot rename to", [&] { write_text_atomically(folder / "full", "text"); });
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path), {}), 2);
}

TEST_F(Files, RenamesAndSyncs) {
  rename_path(with("a", "text"), folder / "b");
  EXPECT_EQ(read_text("b", folder / "b"), "text");
  expect_error(Exit::data, "cannot rename to " + (folder / "c").string() + ": No such file or directory",
               [&] { rename_path(folder / "a", folder / "c"); });
  sync_directory(folder.path);
  sync_directory("");  // the working directory, as the parent of a bare file name
  expect_error(Exit::data, "cannot sync the folder: No such file or directory",
               [&] { sync_directory(folder / "none"); });
  expect_error(Exit::data, "cannot sync the folder: Not a directory", [&] { sync_directory(folder / "b"); });
  faults.fsync_error = EIO;
  expect_error(Exit::data, "cannot sync the folder: Input/output error", [&] { sync_directory(folder.path); });
  faults.fsync_error = EINVAL;  // a file system without it
  EXPECT_NO_THROW(sync_directory(folder.path));
}

// Expected values: xxhsum -H2 (xxHash 0.8.1).
TEST_F(Files, DigestIsXxh3) {
  const auto of = [](const std::string& text) { return digest(std::as_bytes(std::span(text))); };
  EXPECT_EQ(digest({}), "99aa06d3014798d86001c324468d497f");
  EXPECT_EQ(of("abc"), "06b05ab6733a618578af5f94892f3950");
  std::string text(1024, '\0');
  for (std::size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(i * 7 % 251);
  EXPECT_EQ(of(text), "07fe8eadab1cf098f22ef3dc84ff47ea");
  EXPECT_EQ(of(text.substr(0, 200)), "5451071ed36ad47079ad90815b45bbd9");
  const MappedFile golden("shard", std::string(ROWNORM_GOLDEN) + "/trajectory_main/data/fineweb_val_000000.bin");
  EXPECT_EQ(digest(golden.bytes()), "72d8bbd1f51200023c15ed291edf3cf7");
}

}  // namespace
}  // namespace rownorm
