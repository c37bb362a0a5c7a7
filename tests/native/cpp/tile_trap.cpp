// Runs the amx level's machine code where there is no AMX. There a tile instruction raises SIGILL: the handler does to
// tiles in memory what Intel's manual (Software Developer's Manual, volume 2) says of it, and goes on behind it. Where
// the manual has a fault, or the instruction is no tile instruction, the process ends with a line that says what and
// where. Built into the module by -DRIDGELINE_TILE_TRAP=ON; used by scripts/tile_trap.
#include "tile_trap.h"

#include <dlfcn.h>
#include <immintrin.h>
#include <signal.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace ridgeline {
namespace {

constexpr int kTiles = 8, kRows = 16, kRowBytes = 64, kWords = kRowBytes / 4;  // palette 1, the only one there is

// As ldtilecfg reads it and sttilecfg writes it.
struct Config {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(Config) == 64);

// A thread's registers. Palette 0: not configured. What a tile's shape leaves out is zero.
struct Registers {
  Config config;
  alignas(64) uint8_t tiles[kTiles][kRows][kRowBytes];
};
thread_local Registers registers;

std::atomic<int64_t> num_emulated{0};

struct Form;

// Tile numbers as encoded, up to 15; `address` and `stride` of memory operands.
struct Instruction {
  const Form* form;
  const uint8_t* at;
  int length;
  int destination, first, second;  // tiles: ModRM.reg, ModRM.rm, VEX.vvvv
  uint8_t* address;
  int64_t stride;
};

enum class Operands { none, memory, tile, strided, product };

struct Form {
  uint8_t prefix, opcode;  // VEX.pp: 0 none, 1 is 66, 2 is F3, 3 is F2
  Operands operands;
  const char* name;
  void (*run)(const Instruction&);
};

// The line, then abort(): its signal lets Python's fault handler show who called.
[[noreturn, gnu::format(printf, 4, 5)]] void fail(const char* name, const uint8_t* at, int length, const char* format,
                                                  ...) {
  char line[512], where[200];
  Dl_info object{};
  if (dladdr(at, &object) && object.dli_fname)
    snprintf(where, sizeof where, "%s+0x%zx", object.dli_fname, (size_t)(at - (const uint8_t*)object.dli_fbase));
  else
    snprintf(where, sizeof where, "0x%zx", (size_t)at);
  int n = snprintf(line, sizeof line, "tile_trap: %s at %s (", name, where);
  for (int i = 0; i < length; i++) n += snprintf(line + n, sizeof line - n, i ? " %02x" : "%02x", at[i]);
  n += snprintf(line + n, sizeof line - n, "): ");
  va_list arguments;
  va_start(arguments, format);
  n += vsnprintf(line + n, sizeof line - n, format, arguments);
  va_end(arguments);
  n = n < (int)sizeof line - 1 ? n : (int)sizeof line - 2;
  line[n++] = '\n';
  if (write(STDERR_FILENO, line, n) != n) _exit(1);
  abort();
}

#define FAIL_IF(condition, ...) \
  if (condition) fail(in.form->name, in.at, in.length, __VA_ARGS__)

// --- What the instructions do -----------------------------------------------------------------------------------

int rows_of(int tile) { return registers.config.rows[tile]; }
int bytes_of(int tile) { return registers.config.row_bytes[tile]; }

void require_tile(const Instruction& in, int tile) {
  FAIL_IF(registers.config.palette == 0, "#UD: tmm%d is used and the tiles are not configured", tile);
  FAIL_IF(tile >= kTiles, "#UD: tmm%d is not one of %d tiles", tile, kTiles);
  FAIL_IF(rows_of(tile) == 0, "#UD: tmm%d has no rows in this configuration", tile);
}

void release(const Instruction&) { memset(&registers, 0, sizeof registers); }

void load_config(const Instruction& in) {
  Config config;
  memcpy(&config, in.address, sizeof config);
  if (config.palette == 0) return release(in);
  FAIL_IF(config.palette != 1, "#GP: palette %d", config.palette);
  for (const uint8_t byte : config.reserved) FAIL_IF(byte, "#GP: a reserved byte is %d", byte);
  for (int t = 0; t < 16; t++) {
    const int rows = config.rows[t], bytes = config.row_bytes[t];
    FAIL_IF(t >= kTiles && (rows || bytes), "#GP: a shape for tmm%d, which does not exist", t);
    FAIL_IF(rows > kRows || bytes > kRowBytes, "#GP: tmm%d of %d rows x %d bytes", t, rows, bytes);
    FAIL_IF(!rows != !bytes, "#GP: tmm%d of %d rows x %d bytes: one is zero, the other not", t, rows, bytes);
  }
  release(in);
  registers.config = config;
}

void store_config(const Instruction& in) { memcpy(in.address, &registers.config, sizeof registers.config); }

void zero(const Instruction& in) {
  require_tile(in, in.destination);
  memset(registers.tiles[in.destination], 0, sizeof registers.tiles[0]);
  registers.config.start_row = 0;
}

void require_strided(const Instruction& in) {
  const int tile = in.destination, start = registers.config.start_row;
  require_tile(in, tile);
  FAIL_IF(bytes_of(tile) % 4, "#UD: tmm%d has rows of %d bytes, not a multiple of 4", tile, bytes_of(tile));
  FAIL_IF(start >= rows_of(tile), "#UD: start_row %d, but tmm%d has %d rows", start, tile, rows_of(tile));
}

void load(const Instruction& in) {
  require_strided(in);
  const int tile = in.destination;
  uint8_t(&to)[kRows][kRowBytes] = registers.tiles[tile];
  for (int row = registers.config.start_row; row < kRows; row++) {
    memset(to[row], 0, kRowBytes);
    if (row < rows_of(tile)) memcpy(to[row], in.address + row * in.stride, bytes_of(tile));
  }
  registers.config.start_row = 0;
}

void store(const Instruction& in) {
  require_strided(in);
  const int tile = in.destination;
  for (int row = registers.config.start_row; row < rows_of(tile); row++)
    memcpy(in.address + row * in.stride, registers.tiles[tile][row], bytes_of(tile));
  registers.config.start_row = 0;
}

// C[m][n] += A[m][k] . B[k][n]: C the destination, A the first operand, B the second.
void require_product(const Instruction& in) {
  const int c = in.destination, a = in.first, b = in.second;
  FAIL_IF(c == a || c == b || a == b, "#UD: one tile twice among tmm%d, tmm%d, tmm%d", c, a, b);
  for (const int tile : {c, a, b}) {
    require_tile(in, tile);
    FAIL_IF(bytes_of(tile) % 4, "#UD: tmm%d has rows of %d bytes, not a multiple of 4", tile, bytes_of(tile));
  }
  FAIL_IF(bytes_of(c) != bytes_of(b), "#UD: rows of %d bytes in tmm%d, of %d in tmm%d", bytes_of(c), c, bytes_of(b), b);
  FAIL_IF(rows_of(c) != rows_of(a), "#UD: %d rows in tmm%d, %d in tmm%d", rows_of(c), c, rows_of(a), a);
  FAIL_IF(bytes_of(a) / 4 != rows_of(b), "#UD: rows of %d words in tmm%d, %d rows in tmm%d", bytes_of(a) / 4, a,
          rows_of(b), b);
}

// Computes every row of C by `row`(C's, A's words in use, how many, B's rows), and clears what C's shape leaves out.
template <class Row>
void product(const Instruction& in, Row row) {
  require_product(in);
  const int c = in.destination, bytes = bytes_of(c);
  uint8_t(&tile)[kRows][kRowBytes] = registers.tiles[c];
  for (int m = 0; m < kRows; m++) {
    uint32_t sums[kWords], from[kWords];
    memcpy(sums, tile[m], sizeof sums);
    memcpy(from, registers.tiles[in.first][m], sizeof from);
    if (m < rows_of(c)) row(sums, from, bytes_of(in.first) / 4, (const uint32_t(*)[kWords])registers.tiles[in.second]);
    memset(tile[m], 0, kRowBytes);
    if (m < rows_of(c)) memcpy(tile[m], sums, bytes);
  }
  registers.config.start_row = 0;
}

float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// The manual's order: sums of the even and of the odd products over all k, then their sum, then C's.
[[gnu::noinline]] void bf16_row(uint32_t* sums, const uint32_t* a, int num_words, const uint32_t (*b)[kWords]) {
  float even[kWords] = {}, odd[kWords] = {}, c[kWords];
  for (int k = 0; k < num_words; k++)
    for (int n = 0; n < kWords; n++) {
      even[n] = __builtin_fmaf(float_of(a[k] << 16), float_of(b[k][n] << 16), even[n]);
      odd[n] = __builtin_fmaf(float_of(a[k] & 0xffff0000), float_of(b[k][n] & 0xffff0000), odd[n]);
    }
  memcpy(c, sums, sizeof c);
  for (int n = 0; n < kWords; n++) c[n] += even[n] + odd[n];
  memcpy(sums, c, sizeof c);
}

// bf16_row() is not inlined: no arithmetic of it may leave the region of this control word.
void product_bf16(const Instruction& in) {
  constexpr unsigned kMaskedToNearestFlushing = 0x9fc0;  // denormals are zero, in and out
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(kMaskedToNearestFlushing);
  product(in, bf16_row);
  _mm_setcsr(saved);
}

// Sums wrap around: the manual's dword additions do not saturate.
template <class A, class B>
void product_bytes(const Instruction& in) {
  product(in, [](uint32_t* sums, const uint32_t* a, int num_words, const uint32_t(*b)[kWords]) {
    for (int k = 0; k < num_words; k++)
      for (int n = 0; n < kWords; n++)
        for (int shift = 0; shift < 32; shift += 8)
          sums[n] += (uint32_t)((int32_t)(A)(a[k] >> shift) * (int32_t)(B)(b[k][n] >> shift));
  });
}

constexpr Form kForms[] = {
    {0, 0x49, Operands::none, "tilerelease", release},
    {0, 0x49, Operands::memory, "ldtilecfg", load_config},
    {1, 0x49, Operands::memory, "sttilecfg", store_config},
    {3, 0x49, Operands::tile, "tilezero", zero},
    {3, 0x4b, Operands::strided, "tileloadd", load},
    {1, 0x4b, Operands::strided, "tileloaddt1", load},
    {2, 0x4b, Operands::strided, "tilestored", store},
    {2, 0x5c, Operands::product, "tdpbf16ps", product_bf16},
    {3, 0x5e, Operands::product, "tdpbssd", product_bytes<int8_t, int8_t>},
    {2, 0x5e, Operands::product, "tdpbsud", product_bytes<int8_t, uint8_t>},
    {1, 0x5e, Operands::product, "tdpbusd", product_bytes<uint8_t, int8_t>},
    {0, 0x5e, Operands::product, "tdpbuud", product_bytes<uint8_t, uint8_t>},
};

// --- How they are encoded -----------------------------------------------------------------------------------------

// By the number in the encoding.
constexpr int kGeneral[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                              REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

bool fits(Operands operands, int mod, int reg, int rm) {
  switch (operands) {
    case Operands::none: return mod == 3 && reg == 0 && rm == 0;
    case Operands::memory: return mod != 3 && reg == 0;
    case Operands::tile: return mod == 3 && rm == 0;
    case Operands::strided: return mod != 3 && rm == 4;
    case Operands::product: return mod == 3;
  }
  return false;
}

// The memory operand whose ModRM byte is at[4]. A strided one's index is not part of the address.
void decode_memory(Instruction& in, const greg_t* general, bool x, bool b) {
  const uint8_t* next = in.at + 5;
  const int mod = in.at[4] >> 6, rm = in.at[4] & 7;
  int base = rm;
  int64_t index = 0;
  if (rm == 4) {
    const uint8_t sib = *next++;
    const int number = (sib >> 3 & 7) | (x ? 8 : 0);
    if (number != 4) index = (int64_t)((uint64_t)general[kGeneral[number]] << (sib >> 6));
    base = sib & 7;
  }
  const bool no_base = mod == 0 && base == 5;
  int64_t address = no_base ? 0 : general[kGeneral[base | (b ? 8 : 0)]];
  if (mod == 1) {
    address += (int8_t)*next++;
  } else if (mod == 2 || no_base) {
    int32_t displacement;
    memcpy(&displacement, next, 4);
    next += 4;
    address += displacement;
  }
  if (no_base && rm == 5) address += (int64_t)next;  // from the next instruction
  if (in.form->operands == Operands::strided)
    in.stride = index;
  else
    address += index;
  in.address = (uint8_t*)address;
  in.length = (int)(next - in.at);
}

// False where there is no tile instruction. Reads no byte behind the first that tells.
bool decode(const uint8_t* at, const greg_t* general, Instruction& in) {
  if (at[0] != 0xc4 || (at[1] & 0x1f) != 2 || (at[2] & 0x84) != 0) return false;  // VEX, 0F38, W0, 128 bits
  const bool r = !(at[1] & 0x80), x = !(at[1] & 0x40), b = !(at[1] & 0x20);
  const int vvvv = ~at[2] >> 3 & 15, prefix = at[2] & 3, mod = at[4] >> 6, reg = at[4] >> 3 & 7, rm = at[4] & 7;
  for (const Form& form : kForms) {
    if (form.prefix != prefix || form.opcode != at[3] || !fits(form.operands, mod, reg, rm)) continue;
    if (vvvv != 0 && form.operands != Operands::product) return false;
    in = {&form, at, 5, reg | (r ? 8 : 0), rm | (b ? 8 : 0), vvvv, nullptr, 0};
    if (form.operands == Operands::memory || form.operands == Operands::strided) decode_memory(in, general, x, b);
    return true;
  }
  return false;
}

// Runs tile instructions up to the first other: each that needs no signal of its own saves one. The signal is raised by
// the instruction itself, so the thread is in no other code: its first use of `registers` may allocate.
void on_illegal_instruction(int, siginfo_t*, void* context) {
  greg_t* general = ((ucontext_t*)context)->uc_mcontext.gregs;
  const uint8_t* at = (const uint8_t*)general[REG_RIP];
  Instruction in;
  if (!decode(at, general, in)) fail("illegal instruction", at, 8, "not a tile instruction");
  do {
    in.form->run(in);
    num_emulated.fetch_add(1, std::memory_order_relaxed);
    at += in.length;
  } while (decode(at, general, in));
  general[REG_RIP] = (greg_t)at;
}

// A run that trapped nothing tested nothing: say how much it was, on the way out.
void report() {
  if (const long long count = num_emulated.load()) fprintf(stderr, "tile_trap: %lld tile instructions\n", count);
}

}  // namespace

bool install_tile_trap() {
  struct sigaction action {};
  action.sa_sigaction = on_illegal_instruction;
  action.sa_flags = SA_SIGINFO;
  sigemptyset(&action.sa_mask);
  sigaction(SIGILL, &action, nullptr);
  atexit(report);
  return true;
}

}  // namespace ridgeline
