#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "base/expect_error.h"
#include "base/temporary_folder.h"
#include "data/files.h"
#include "data/shards.h"

namespace rownorm {
namespace {

void put(std::vector<std::byte>& bytes, std::size_t word, std::int32_t value) {
  std::memcpy(bytes.data() + 4 * word, &value, 4);
}

TEST(Shard, InMemory) {
  ShardSet shards("train", std::vector<std::uint16_t>{3, 0, 9}, 10);
  ASSERT_EQ(shards.shards().size(), 1u);
  EXPECT_EQ(shards.tokens(), 3);
  const auto tokens = shards.tokens_of(0);
  EXPECT_EQ(std::vector<std::uint16_t>(tokens.begin(), tokens.end()), (std::vector<std::uint16_t>{3, 0, 9}));
  EXPECT_THROW(shards.tokens_of(1), std::out_of_range);
  EXPECT_THROW(ShardSet("train", std::vector<std::uint16_t>{3, 0, 9}, 9), std::logic_error);
}

TEST(Shard, HeaderAndTokensReadBack) {
  const TemporaryFolder folder;
  const auto path = write_shard(folder / "a_000001.bin", {5, 0, 65535, 7, 258});
  const ShardInfo info = read_shard_info(path);
  EXPECT_EQ(info.path, path);
  EXPECT_EQ(info.name(), "a_000001.bin");
  EXPECT_EQ(info.tokens, 5);
  EXPECT_EQ(info.header_digest.size(), 32u);

  ShardSet shards("train", path.string(), 65536);
  EXPECT_EQ(shards.tokens(), 5);
  const auto tokens = shards.tokens_of(0);
  EXPECT_EQ(std::vector<std::uint16_t>(tokens.begin(), tokens.end()),
            (std::vector<std::uint16_t>{5, 0, 65535, 7, 258}));
}

TEST(Shard, DigestTellsHeadersApart) {
  auto bytes = shard_bytes(counting(9));
  const std::string digest = parse_shard(bytes, "x.bin").header_digest;
  bytes[1024] = std::byte{77};  // tokens are not part of it
  EXPECT_EQ(parse_shard(bytes, "x.bin").header_digest, digest);
  put(bytes, 255, 1);  // the last word of the header is
  EXPECT_NE(parse_shard(bytes, "x.bin").header_digest, digest);
}

TEST(Shard, EveryFaultOfItsBytesIsNamed) {
  const auto good = shard_bytes(counting(1000));
  const auto refused = [](const std::vector<std::byte>& bytes, const std::string& message) {
    expect_error(Exit::data, message, [&] { parse_shard(bytes, "d/x.bin"); });
  };
  const auto resized = [&](std::size_t size, const std::string& message) {
    auto bytes = good;
    bytes.resize(size);
    refused(bytes, message);
  };
  const auto with = [&](std::size_t word, std::int32_t value, const std::string& message) {
    auto bytes = good;
    put(bytes, word, value);
    refused(bytes, message);
  };
  resized(0, "[shard] d/x.bin: the file is empty");
  resized(1, "[shard] d/x.bin: the file holds 1 bytes, a header alone has 1024 (truncated?)");
  resized(1023, "[shard] d/x.bin: the file holds 1023 bytes, a header alone has 1024 (truncated?)");
  resized(1024, "[shard] d/x.bin: header says 1000 tokens, the file holds 0 (truncated?)");
  resized(1024 + 1996, "[shard] d/x.bin: header says 1000 tokens, the file holds 998 (truncated?)");
  resized(1024 + 1999, "[shard] d/x.bin: header says 1000 tokens, the file holds 999 and an odd byte (truncated?)");
  resized(1024 + 2001, "[shard] d/x.bin: header says 1000 tokens, the file holds 1000 and an odd byte (too long)");
  resized(1024 + 2002, "[shard] d/x.bin: header says 1000 tokens, the file holds 1001 (too long)");
  with(0, 20240521, "[shard] d/x.bin: magic number 20240521, must be 20240520 (not a token shard?)");
  with(1, 2, "[shard] d/x.bin: format version 2, must be 1");
  with(2, -1, "[shard] d/x.bin: header says -1 tokens, must be at least 1");
  with(2, INT32_MIN, "[shard] d/x.bin: header says -2147483648 tokens, must be at least 1");
  with(2, 0, "[shard] d/x.bin: header says 0 tokens, must be at least 1");
  with(2, INT32_MAX, "[shard] d/x.bin: header says 2147483647 tokens, the file holds 1000 (truncated?)");
}

TEST(Shard, WhatIsNoReadableFileIsNamed) {
  const TemporaryFolder folder;
  const auto file = write_shard(folder / "file.bin", counting(3));
  std::filesystem::create_symlink("loop.bin", folder / "loop.bin");
  std::filesystem::create_symlink("nowhere.bin", folder / "dangling.bin");
  std::filesystem::create_directory(folder / "inner.bin");
  ASSERT_EQ(::mkfifo((folder / "pipe.bin").c_str(), 0600), 0);
  for (const auto& path : {folder / "absent.bin", folder / "loop.bin", folder / "dangling.bin", folder / "inner.bin",
                           folder / "pipe.bin", file / "below.bin"})
    expect_error(Exit::data, "[shard] " + path.string() + ": ", [&] { read_shard_info(path); });
}

TEST(Shard, AFileWithoutPermissionIsNamed) {
  if (::geteuid() == 0) GTEST_SKIP() << "root may read everything";
  const TemporaryFolder folder;
  const auto path = write_shard(folder / "locked.bin", counting(3));
  std::filesystem::permissions(path, std::filesystem::perms::none);
  expect_error(Exit::data, "[shard] " + path.string() + ": cannot read: ", [&] { read_shard_info(path); });
}

std::vector<std::string> expanded(const std::filesystem::path& pattern, const std::filesystem::path& below) {
  std::vector<std::string> names;
  for (const auto& path : expand_pattern(pattern.string())) names.push_back(path.lexically_relative(below).string());
  return names;
}

TEST(Pattern, GlobsAnyComponentAndSortsByFileName) {
  const TemporaryFolder folder;
  for (const char* name : {"b/t_2.bin", "a/t_3.bin", "b/t_1.bin", "a/t_1.bin", "a/t_10.bin", "c/t_1.txt"})
    write_shard(folder / name, counting(3));
  using Names = std::vector<std::string>;
  const auto root = folder / "";
  EXPECT_EQ(expanded(folder / "a/t_1.bin", root), (Names{"a/t_1.bin"}));
  EXPECT_EQ(expanded(folder / "a/*.bin", root), (Names{"a/t_1.bin", "a/t_10.bin", "a/t_3.bin"}));
  EXPECT_EQ(expanded(folder / "*/t_*.bin", root),
            (Names{"a/t_1.bin", "b/t_1.bin", "a/t_10.bin", "b/t_2.bin", "a/t_3.bin"}));
  EXPECT_EQ(expanded(folder / "?/t_[12].bin", root), (Names{"a/t_1.bin", "b/t_1.bin", "b/t_2.bin"}));
  EXPECT_EQ(expanded(folder / "[!a]/t_1.bin", root), (Names{"b/t_1.bin"}));
  EXPECT_EQ(ShardSet("train", (folder / "*/t_*.bin").string(), 3).tokens(), 5 * 3);

  write_shard(folder / "set[1]/x.bin", counting(3));  // a name that only looks like a pattern
  EXPECT_EQ(expanded(folder / "set[1]/x.bin", root), (Names{"set[1]/x.bin"}));
}

TEST(Pattern, NothingMatchedOrAFolderIsNamed) {
  const TemporaryFolder folder;
  write_shard(folder / "a/t_1.bin", counting(3));
  std::filesystem::create_directory(folder / "a/t_2.bin");
  const auto message = [](const std::filesystem::path& pattern, const std::string& part) {
    expect_error(Exit::data, part, [&] { expand_pattern(pattern.string()); });
  };
  const std::string none = (folder / "a/u_*.bin").string(), nowhere = (folder / "?x/t_*.bin").string();
  message(none, "[shard] " + none + ": no file matches this pattern");
  message(nowhere, "[shard] " + nowhere + ": no file matches this pattern");
  const std::string a = (folder / "a").string(), all = (folder / "a/t_*.bin").string();
  message(a, "[shard] " + a + ": is a folder, must be a file or a pattern such as " + a + "/*.bin");
  message(all, "[shard] " + a + "/t_2.bin: is a folder, but matches " + all + "; only files may");
  const std::string missing = (folder / "a/t_7.bin").string();
  expect_error(Exit::data, "[shard] " + missing + ": ", [&] { ShardSet("train", missing, 5); });
}

TEST(ShardSet, ABadTokenIsNamedWhenItsShardIsFirstUsed) {
  const TemporaryFolder folder;
  auto bad = counting(40000);
  for (auto& token : bad) token %= 100;
  bad[39998] = 300;
  bad[33333] = 100;
  write_shard(folder / "s_0.bin", counting(100));
  const auto path = write_shard(folder / "s_1.bin", bad);
  ShardSet shards("validation", (folder / "s_*.bin").string(), 100);
  EXPECT_EQ(shards.tokens_of(0).size(), 100u);
  for (int attempt = 0; attempt < 2; ++attempt)
    expect_error(Exit::data,
                 "[shard] " + path.string() +
                     ": token 33333 of the validation data is 100, must be less than model.vocab_size 100",
                 [&] { shards.tokens_of(1); });
  EXPECT_EQ(ShardSet("validation", path.string(), 301).tokens_of(0)[39998], 300);
}

TEST(ShardSet, AShardThatChangedSinceItsHeaderWasReadIsRefused) {
  const TemporaryFolder folder;
  const auto path = write_shard(folder / "s.bin", counting(100));
  ShardSet shards("train", path.string(), 65536);
  write_shard(path, counting(90));
  expect_error(Exit::data, "[shard] " + path.string() + ": the header has changed since the run began",
               [&] { shards.tokens_of(0); });
  std::filesystem::resize_file(path, 1024);
  expect_error(Exit::data, "truncated?", [&] { shards.tokens_of(0); });
  std::filesystem::remove(path);
  expect_error(Exit::data, path.string(), [&] { shards.tokens_of(0); });
}

TEST(BadToken, IsTheFirstAtAnyPosition) {
  // Sizes and positions around the chunk of the scan (16384) and around vector lengths.
  for (const std::size_t size :
       {std::size_t{1}, std::size_t{31}, std::size_t{16384}, std::size_t{16385}, std::size_t{40001}}) {
    std::vector<std::uint16_t> tokens(size, 50256);
    EXPECT_EQ(find_bad_token(tokens, 50257).position, -1);
    for (const std::size_t at : {std::size_t{0}, size / 2, size - 1, std::min(size, std::size_t{16384}) - 1}) {
      tokens[at] = 50257;
      const BadToken bad = find_bad_token(tokens, 50257);
      EXPECT_EQ(bad.position, static_cast<std::int64_t>(at));
      EXPECT_EQ(bad.value, 50257);
      tokens[size - 1] = 65535;  // a later one does not matter
      EXPECT_EQ(find_bad_token(tokens, 50257).position, static_cast<std::int64_t>(at));
      tokens[at] = tokens[size - 1] = 50256;
    }
  }
  const std::vector<std::uint16_t> any{0, 65535};
  EXPECT_EQ(find_bad_token(any, 65536).position, -1);
  EXPECT_EQ(find_bad_token(any, 65535).position, 1);
  EXPECT_EQ(find_bad_token({}, 1).position, -1);
}

}  // namespace
}  // namespace rownorm
