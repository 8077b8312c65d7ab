// Under the thread sanitizer: threads that copy to one array in a critical section, which it must not report, and with
// the argument "race" threads that do so without, which it must. By memcpy, because that is what a wrong TSAN_OPTIONS
// makes it blind to (tests/tsan.supp).
#include <cstdio>
#include <cstring>

int main(int count, char** arguments) {
  const bool race = count > 1 && std::strcmp(arguments[1], "race") == 0;
  const char from[64] = "from";
  char to[64] = "";
#pragma omp parallel num_threads(4)
  if (race) {
    std::memcpy(to, from, sizeof to);
  } else {
#pragma omp critical
    std::memcpy(to, from, sizeof to);
  }
  std::printf("%s\n", to);
  return 0;
}
