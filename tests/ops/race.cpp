// Under the thread sanitizer: threads that keep a struct in a critical section, which it must not report, and with the
// argument "race" threads that do so without, which it must.
#include <cstdio>
#include <cstring>

namespace {

struct Best {
  double value = 0;
  int at = 0;
};

}  // namespace

int main(int count, char** arguments) {
  const bool race = count > 1 && std::strcmp(arguments[1], "race") == 0;
  Best best;
#pragma omp parallel for num_threads(4)
  for (int i = 0; i < 1000; ++i) {
    const Best mine{0.5 * i, i};
    if (race) {
      if (mine.value > best.value) best = mine;
    } else {
#pragma omp critical
      if (mine.value > best.value) best = mine;
    }
  }
  std::printf("%g\n", best.value);
  return 0;
}
