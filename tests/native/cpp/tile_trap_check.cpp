// Checks tile_trap.cpp itself: numbers, addresses and configurations against what is written here, and that every
// fault ends the process with its line. Exit status 1, with what differs, unless all is well. Used by
// scripts/tile_trap.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>
#include <thread>

#include "tile_trap.h"

namespace {

int num_failed = 0;

void check(bool holds, const char* what) {
  if (!holds) fprintf(stderr, "tile_trap_check: wrong: %s\n", what), num_failed++;
}

struct alignas(64) Config {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

Config whole_tiles() {
  Config config;
  for (int t = 0; t < 8; t++) config.row_bytes[t] = 64, config.rows[t] = 16;
  return config;
}

void configure(const Config& config) { __asm__ volatile("ldtilecfg %0" ::"m"(config) : "memory"); }

struct alignas(64) Tile {
  uint32_t words[16][16] = {};
};

#define LOAD(number, tile) \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #number ::"r"(&(tile)), "r"(64L) : "memory")
#define STORE(number, tile) \
  __asm__ volatile("tilestored %%tmm" #number ", (%0,%1,1)" ::"r"(&(tile)), "r"(64L) : "memory")

// tmm0 += tmm1 . tmm2 by `instruction`.
#define PRODUCT(instruction, c, a, b)                       \
  LOAD(0, c);                                               \
  LOAD(1, a);                                               \
  LOAD(2, b);                                               \
  __asm__ volatile(instruction " %tmm2, %tmm1, %tmm0"); \
  STORE(0, c)

Tile numbered(uint32_t start) {
  Tile tile;
  for (auto& row : tile.words)
    for (uint32_t& word : row) word = start = start * 1664525u + 1013904223u;
  return tile;
}

// --- Results ------------------------------------------------------------------------------------------------------

struct Shape {
  int m = 16, k = 16, n = 16;  // rows of C and A, words in A and rows of B, words in B and C
};

template <class A, class B>
bool same_sums(const Tile& c, const Tile& a, const Tile& b, const Tile& result, Shape shape = {}) {
  for (int m = 0; m < shape.m; m++)
    for (int n = 0; n < shape.n; n++) {
      int64_t sum = c.words[m][n];
      for (int i = 0; i < 4 * shape.k; i++)
        sum += (int64_t)((const A*)a.words[m])[i] * (int64_t)((const B*)b.words[i / 4])[4 * n + i % 4];
      if ((uint32_t)sum != result.words[m][n]) return false;
    }
  return true;
}

void check_bytes() {
  const Tile c = numbered(1), a = numbered(2), b = numbered(3);
  configure(whole_tiles());
  Tile result = c;
  PRODUCT("tdpbssd", result, a, b);
  check((same_sums<int8_t, int8_t>(c, a, b, result)), "tdpbssd");
  result = c;
  PRODUCT("tdpbsud", result, a, b);
  check((same_sums<int8_t, uint8_t>(c, a, b, result)), "tdpbsud");
  result = c;
  PRODUCT("tdpbusd", result, a, b);
  check((same_sums<uint8_t, int8_t>(c, a, b, result)), "tdpbusd");
  result = c;
  PRODUCT("tdpbuud", result, a, b);
  check((same_sums<uint8_t, uint8_t>(c, a, b, result)), "tdpbuud");
  const Shape narrow{5, 7, 11};
  Config config = whole_tiles();
  config.rows[0] = config.rows[1] = narrow.m, config.rows[2] = narrow.k;
  config.row_bytes[0] = config.row_bytes[2] = 4 * narrow.n, config.row_bytes[1] = 4 * narrow.k;
  configure(config);
  result = c;
  PRODUCT("tdpbsud", result, a, b);
  check((same_sums<int8_t, uint8_t>(c, a, b, result, narrow)), "tdpbsud of 5 x 7 by 7 x 11 words");
}

uint32_t bits(float value) {
  uint32_t word;
  memcpy(&word, &value, 4);
  return word;
}

// A pair of bfloat16, for floats that are such.
uint32_t pair(float even, float odd) { return bits(even) >> 16 | (bits(odd) & 0xffff0000); }

// c + (the sum of a[k] . b[k] over two k) in one element.
uint32_t bf16_sum(uint32_t c_bits, uint32_t a0, uint32_t b0, uint32_t a1 = 0, uint32_t b1 = 0) {
  Tile c, a, b;
  c.words[3][5] = c_bits;
  a.words[3][0] = a0, a.words[3][1] = a1;
  b.words[0][5] = b0, b.words[1][5] = b1;
  PRODUCT("tdpbf16ps", c, a, b);
  return c.words[3][5];
}

void check_bf16() {
  const float big = 0x1p30f, tiny = 0x1p-70f;
  configure(whole_tiles());
  check(bf16_sum(bits(1.5f), pair(2, 3), pair(5, 7)) == bits(32.5f), "a sum of two products");
  check(bf16_sum(0, pair(0x1p24f, 0), pair(1, 0), pair(1, 0), pair(1, 0)) == bits(0x1p24f), "a tie to even, down");
  check(bf16_sum(0, pair(0x1p24f, 0), pair(1, 0), pair(3, 0), pair(1, 0)) == bits(0x1p24f + 4), "a tie to even, up");
  check(bf16_sum(0, pair(big, 1), pair(1, 1), pair(-big, 0), pair(1, 0)) == bits(1), "even and odd products apart");
  check(bf16_sum(bits(big), pair(-big, 1), pair(1, 1)) == 0, "the products' sum comes before the old value");
  check(bf16_sum(0, pair(0x1p-63f, 0), pair(0x1p-63f, 0), pair(0x1p-63f, 0), pair(0x1p-64f, 0)) == bits(0x1.8p-126f),
        "products are added unrounded");
  check(bf16_sum(bits(0x1p-126f), pair(tiny, 0), pair(tiny, 0)) == bits(0x1p-126f), "results that are denormal");
  check(bf16_sum(1, 0, 0) == 0, "an old value that is denormal");
  check(bf16_sum(0, 1, pair(big, 0)) == 0, "an operand that is denormal");
  check(bf16_sum(bits(1), pair(std::numeric_limits<float>::infinity(), 0), pair(2, 0)) == 0x7f800000, "infinity");
}

// Loads tmm0 by one addressing mode, from rows 192 bytes apart that begin 200 bytes behind `base`.
#define CHECK_LOAD(mode, setup, base_value)                                                                      \
  {                                                                                                              \
    Tile found;                                                                                                  \
    uint64_t saved = (uint64_t)(base_value);                                                                     \
    __asm__ volatile(setup "\n\ttileloadd " mode ", %%tmm0" ::"a"(saved), "m"(*memory)                          \
                     : "rcx", "rdx", "rbx", "rsi", "rdi", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", \
                       "memory");                                                                                \
    STORE(0, found);                                                                                             \
    bool same = true;                                                                                            \
    for (int row = 0; row < 16; row++) same &= !memcmp(found.words[row], *memory + 200 + 192 * row, 64);        \
    check(same, "tileloadd " mode);                                                                              \
  }

void check_addresses() {
  static uint8_t bytes[16 * 192 + 400];
  uint8_t(*memory)[sizeof bytes] = &bytes;
  for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = (uint8_t)(i * 7 + i / 256);
  configure(whole_tiles());
  CHECK_LOAD("(%%rax,%%rcx,1)", "mov $192, %%ecx", bytes + 200);
  CHECK_LOAD("100(%%rbx,%%rdx,2)", "mov %%rax, %%rbx; mov $96, %%edx", bytes + 100);
  CHECK_LOAD("200(%%rsi,%%rdi,4)", "mov %%rax, %%rsi; mov $48, %%edi", bytes);
  CHECK_LOAD("-8(%%r8,%%r9,8)", "mov %%rax, %%r8; mov $24, %%r9d", bytes + 208);
  CHECK_LOAD("(%%r12,%%r10,1)", "mov %%rax, %%r12; mov $192, %%r10d", bytes + 200);
  CHECK_LOAD("(%%r13,%%r12,1)", "mov %%rax, %%r13; mov $192, %%r12d", bytes + 200);
  CHECK_LOAD("1000(%%r14,%%r15,1)", "lea -800(%%rax), %%r14; mov $192, %%r15d", bytes);
  CHECK_LOAD("(%%rcx,%%r11,1)", "mov %%rax, %%rcx; mov $192, %%r11d", bytes + 200);
  Tile found;
  __asm__ volatile(
      "sub $256, %%rsp\n\tvmovdqu64 %0, %%zmm1\n\tvmovdqu64 %%zmm1, 64(%%rsp)\n\t"
      "tileloadd 64(%%rsp), %%tmm0\n\tadd $256, %%rsp" ::"m"(bytes) : "xmm1", "memory");
  STORE(0, found);
  bool same = true;
  for (const auto& row : found.words) same &= !memcmp(row, bytes, 64);
  check(same, "tileloadd 64(%rsp): without an index every row is the first");
}

// What the shapes leave out stays as it is in memory and is zero in tiles; a configuration stays until the next.
void check_shapes() {
  Config config = whole_tiles(), found;
  config.rows[0] = 3, config.row_bytes[0] = 20;
  configure(config);
  __asm__ volatile("sttilecfg %0" : "=m"(found)::"memory");
  check(!memcmp(&config, &found, sizeof config), "sttilecfg");
  const Tile from = numbered(4);
  Tile to = numbered(5);
  LOAD(0, from);
  STORE(0, to);
  const Tile rest = numbered(5);
  for (int r = 0; r < 16; r++)
    for (int i = 0; i < 16; i++)
      check(to.words[r][i] == (r < 3 && i < 5 ? from : rest).words[r][i], "a tile of 3 rows of 20 bytes");
  config.start_row = 1;
  configure(config);
  LOAD(0, from);
  STORE(0, to);
  check(to.words[0][0] == 0 && to.words[1][0] == from.words[1][0], "a load that goes on at start_row");
  LOAD(1, from);
  __asm__ volatile("tilezero %tmm1");
  STORE(1, to);
  check(!memcmp(&to, std::array<char, sizeof to>{}.data(), sizeof to), "tilezero");
  __asm__ volatile("tilerelease\n\tsttilecfg %0" : "=m"(found)::"memory");
  check(!memcmp(&found, std::array<char, sizeof found>{}.data(), sizeof found), "tilerelease");
}

// --- Faults -------------------------------------------------------------------------------------------------------

struct Fault {
  const char* line;  // a part of it
  void (*run)();
};

void configure_with(void (*change)(Config&)) {
  Config config = whole_tiles();
  change(config);
  configure(config);
}

void multiply() { __asm__ volatile("tdpbf16ps %tmm2, %tmm1, %tmm0"); }

const Fault kFaults[] = {
    {"ldtilecfg at ", [] { configure_with([](Config& c) { c.palette = 2; }); }},
    {"#GP: palette 2", [] { configure_with([](Config& c) { c.palette = 2; }); }},
    {"#GP: a reserved byte is 9", [] { configure_with([](Config& c) { c.reserved[13] = 9; }); }},
    {"#GP: a shape for tmm8", [] { configure_with([](Config& c) { c.rows[8] = 1; }); }},
    {"#GP: tmm3 of 17 rows", [] { configure_with([](Config& c) { c.rows[3] = 17; }); }},
    {"#GP: tmm3 of 16 rows x 68 bytes", [] { configure_with([](Config& c) { c.row_bytes[3] = 68; }); }},
    {"#GP: tmm5 of 0 rows x 64 bytes", [] { configure_with([](Config& c) { c.rows[5] = 0; }); }},
    {"(c4 e2 7b 49 f0): #UD: tmm6 is used and the tiles are not", [] { __asm__ volatile("tilezero %tmm6"); }},
    {"#UD: tmm0 is used and the tiles are not",
     [] {
       configure(whole_tiles());
       std::thread([] { __asm__ volatile("tilezero %tmm0"); }).join();  // tiles are a thread's own
     }},
    {"#UD: tmm0 is used and the tiles are not",
     [] {
       configure(whole_tiles());
       __asm__ volatile("tilerelease");
       multiply();
     }},
    {"#UD: tmm7 has no rows",
     [] {
       configure_with([](Config& c) { c.rows[7] = 0, c.row_bytes[7] = 0; });
       __asm__ volatile("tilezero %tmm7");
     }},
    {"#UD: tmm9 is not one of 8",
     [] {
       configure(whole_tiles());
       __asm__ volatile(".byte 0xc4, 0x62, 0x7b, 0x49, 0xc8");  // tilezero, VEX.R
     }},
    {"tdpbf16ps at ", [] { multiply(); }},
    {"#UD: 15 rows in tmm0, 16 in tmm1",
     [] {
       configure_with([](Config& c) { c.rows[0] = 15; });
       multiply();
     }},
    {"#UD: rows of 64 bytes in tmm0, of 60 in tmm2",
     [] {
       configure_with([](Config& c) { c.row_bytes[2] = 60; });
       multiply();
     }},
    {"#UD: rows of 15 words in tmm1, 16 rows in tmm2",
     [] {
       configure_with([](Config& c) { c.row_bytes[1] = 60; });
       multiply();
     }},
    {"#UD: tmm1 has rows of 62 bytes",
     [] {
       configure_with([](Config& c) { c.row_bytes[1] = 62; });
       multiply();
     }},
    {"#UD: one tile twice among tmm0, tmm1, tmm0",
     [] {
       configure(whole_tiles());
       __asm__ volatile(".byte 0xc4, 0xe2, 0x7b, 0x5e, 0xc1");  // the assembler refuses it
     }},
    {"#UD: start_row 16, but tmm0 has 16 rows",
     [] {
       configure_with([](Config& c) { c.start_row = 16; });
       Tile tile;
       LOAD(0, tile);
     }},
    {"(0f 0b 90 90 90 90 90 90): not a tile instruction",
     [] { __asm__ volatile("ud2; nop; nop; nop; nop; nop; nop"); }},
};

// What a child that runs it writes, if it ends as it should.
std::string ending(const Fault& fault) {
  int ends[2];
  if (pipe(ends) != 0) return "no pipe";
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDERR_FILENO);
    fault.run();
    _exit(0);
  }
  close(ends[1]);
  char text[1024];
  std::string all;
  for (ssize_t n; (n = read(ends[0], text, sizeof text)) > 0;) all.append(text, n);
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT ? all : "not aborted: " + all;
}

void check_faults() {
  for (const Fault& fault : kFaults) {
    const std::string said = ending(fault);
    const bool one_line = said.find('\n') == said.size() - 1;
    const bool right = said.starts_with("tile_trap: ") && said.find(fault.line) != std::string::npos && one_line;
    if (!right) fprintf(stderr, "of \"%s\": %s", fault.line, said.c_str());
    check(right, fault.line);
  }
}

}  // namespace

int main() {
  ridgeline::install_tile_trap();
  check_faults();  // first: no tiles are configured yet
  check_bytes();
  check_bf16();
  check_addresses();
  check_shapes();
  return num_failed ? 1 : 0;
}
