// Prints the widest level that this machine can run: CMakeLists.txt runs it where only that one is to be built.
#include <cstdio>

#include "runtime/cpu.h"

int main() {
#if defined(__x86_64__)
  using namespace ridgeline;
  std::puts(has_amx() ? "amx" : has_avx512bf16() ? "avx512bf16" : has_avx512() ? "avx512" : has_avx2() ? "avx2" : "portable");
#else
  std::puts("portable");
#endif
}
