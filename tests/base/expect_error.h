// What a user sees when something is wrong: one line and an exit code.
#pragma once
#include <gtest/gtest.h>

#include <string>

#include "base/error.h"

namespace rownorm {

// Runs `action`, which has to fail with `code` and one line that contains `part`.
template <class Action>
void expect_error(Exit code, const std::string& part, Action action) {
  try {
    action();
    ADD_FAILURE() << "no error, expected one with: " << part;
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_EQ(static_cast<int>(error.code()), static_cast<int>(code)) << message;
    EXPECT_NE(message.find(part), std::string::npos) << "got:      " << message << "\nexpected: " << part;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    EXPECT_EQ(message.front(), '[') << message;
  }
}

}  // namespace rownorm
