// Runs every kernel of the portable level, the pool and a tape on made-up numbers, without Python, and writes the
// results: the same program on another architecture must find the same. Built with -DRIDGELINE_SMOKE=ON; used by
// scripts/aarch64.
//
//   smoke write FILE     computes and writes
//   smoke compare A B    exit status 1, with what differs, unless integers are equal and floats near
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/recurrent/types.h"
#include "kernels/sample/types.h"
#include "runtime/isa.h"
#include "runtime/rounds.h"

namespace ridgeline {
namespace {

// Sums of some hundred float32 products in another order, or fused: a share of the section's largest value.
constexpr double kFloatBound = 1e-5;
// The same where such a sum is rounded to an integer on the way: a few fall to the other side.
constexpr double kQuantizedBound = 1e-4;

template <class T>
struct Memory {
  explicit Memory(int64_t count) { buffer.reserve(count * (int64_t)sizeof(T) + 64); }
  T* data() const { return buffer.as<T>(); }
  AlignedBuffer buffer;
};

// The same numbers everywhere: a linear congruence, and floats that are exact.
class Numbers {
 public:
  uint32_t next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state_ >> 33);
  }
  std::vector<float> floats(int64_t count, float largest = 1.0f) {
    std::vector<float> values;
    for (int64_t i = 0; i < count; i++) values.push_back(((float)(next() % 65536) / 32768.0f - 1.0f) * largest);
    return values;
  }

 private:
  uint64_t state_ = 7;
};

// Named sections of bytes, and how far their floats may be from the other machine's: 0 where all bits are the same.
class Results {
 public:
  explicit Results(std::ostream& out) : out_(out) {}
  template <class T>
  void exact(const std::string& name, const T* data, int64_t count) {
    write(name, 0, data, count * (int64_t)sizeof(T));
  }
  void near(const std::string& name, const float* data, int64_t count, double bound = kFloatBound) {
    write(name, bound, data, count * 4);
  }

 private:
  void write(const std::string& name, double bound, const void* data, int64_t bytes) {
    out_ << name << '\n' << bytes << ' ' << bound << '\n';
    out_.write(static_cast<const char*>(data), bytes);
  }
  std::ostream& out_;
};

struct Format {
  const char* name;
  WeightKind kind;
  InputKind input;
  int32_t group;
  bool zero_points;
};
constexpr Format kFormats[] = {
    {"f32", WeightKind::f32, InputKind::f32, 0, false},
    {"bf16", WeightKind::bf16, InputKind::bf16, 0, false},
    {"int8 by int16", WeightKind::int8, InputKind::int16, kMaxInputGroup, false},
    {"int8 by int8", WeightKind::int8, InputKind::int8, kMaxInputGroup, false},
    {"int8 in groups by int16", WeightKind::int8_groups, InputKind::int16, 32, false},
    {"int4 by int16", WeightKind::int4, InputKind::int16, 32, false},
    {"int4 with minima", WeightKind::int4_minima, InputKind::int16, 32, false},
    {"int4 by int8", WeightKind::int4, InputKind::int8, 128, false},
    {"int4 with zero points", WeightKind::int4, InputKind::int16, 64, true},
    {"mxfp4 by int8", WeightKind::mxfp4, InputKind::int8, 32, false},
    {"nvfp4 by int16", WeightKind::nvfp4, InputKind::int16, 16, false},
};

// A matrix packed from made-up rows.
struct Packed {
  Packed(const KernelTable& kernels, const Format& format, int64_t outputs, int64_t inputs, Numbers& numbers)
      : matrix{format.kind, format.input, format.zero_points, format.group, outputs, inputs, 0, 0, nullptr},
        memory((outputs + kPanel - 1) / kPanel *
               kernels.linear.panel_bytes(format.kind, inputs, format.group, format.zero_points)) {
    matrix.num_panels = (outputs + kPanel - 1) / kPanel;
    matrix.panel_bytes = kernels.linear.panel_bytes(format.kind, inputs, format.group, format.zero_points);
    matrix.data = memory.data();
    const std::vector<float> weights = numbers.floats(outputs * inputs);
    std::vector<uint16_t> halves;
    std::vector<uint8_t> bytes, zeros;
    for (const float weight : weights) {
      halves.push_back((uint16_t)(std::bit_cast<uint32_t>(weight) >> 16));
      bytes.push_back((uint8_t)(numbers.next() % (format.kind == WeightKind::int4 ? 16 : 256)));
      zeros.push_back((uint8_t)(numbers.next() % 16));
    }
    std::vector<int64_t> order;
    for (int64_t n = 0; n < matrix.num_panels * kPanel; n++) order.push_back(n < outputs ? n : -1);
    const void* rows = format.kind == WeightKind::f32    ? (const void*)weights.data()
                       : format.kind == WeightKind::bf16 ? (const void*)halves.data()
                                                         : (const void*)bytes.data();
    kernels.linear.pack(matrix, rows, weights.data(), format.zero_points ? zeros.data() : nullptr, order.data(), 0,
                        matrix.num_panels);
  }
  Matrix matrix;
  Memory<uint8_t> memory;
};

void linear(const KernelTable& kernels, Numbers& numbers, Results& results) {
  constexpr int64_t kOutputs = 70, kInputs = 205;
  for (const Format& format : kFormats) {
    const Packed packed(kernels, format, kOutputs, kInputs, numbers);
    const Matrix& matrix = packed.matrix;
    const int64_t width = matrix.num_panels * kPanel;
    results.exact(format.name + std::string(": packed"), matrix.data, matrix.num_panels * matrix.panel_bytes);
    std::vector<float> row(kInputs);
    kernels.linear.unpack_output(matrix, 33, row.data());
    results.exact(format.name + std::string(": unpacked"), row.data(), kInputs);
    for (const int64_t rows : {1, 3, 9}) {
      const std::vector<float> x = numbers.floats(rows * kInputs);
      const Memory<uint8_t> input(kernels.linear.input_bytes(matrix, rows)), scratch(kernels.linear.scratch_bytes);
      std::vector<float> out((size_t)(rows * width));
      kernels.linear.prepare_input(matrix, {}, x.data(), kInputs, nullptr, 0, rows, rows, input.data());
      kernels.linear.multiply(matrix, input.data(), rows, 0, matrix.num_panels, false,
                              {EpilogueKind::store, {}, 0, nullptr, out.data(), width}, scratch.data());
      const std::string name = format.name + std::string(" x ") + std::to_string(rows);
      const bool floats = format.input == InputKind::f32 || format.input == InputKind::bf16;
      // Integer products round the same everywhere.
      floats ? results.near(name, out.data(), rows * width) : results.exact(name, out.data(), rows * width);
    }
  }
}

void rows(const KernelTable& kernels, Numbers& numbers, Results& results) {
  constexpr int64_t kWidth = 77;
  const RowKernels& k = kernels.rows;
  const std::vector<float> x = numbers.floats(kWidth, 9), weight = numbers.floats(kWidth), bias = numbers.floats(kWidth);
  std::vector<float> out(kWidth);
  for (const NormKind kind : {NormKind::rms, NormKind::layer}) {
    const float* shift = kind == NormKind::layer ? bias.data() : nullptr;
    k.normalize({kind, 1e-6f, weight.data(), shift}, x.data(), kWidth, out.data());
    results.near("norm " + std::to_string((int)kind), out.data(), kWidth);
  }
  for (const Activation act : {Activation::silu, Activation::gelu, Activation::gelu_tanh, Activation::quick_gelu,
                               Activation::relu, Activation::relu2, Activation::sigmoid}) {
    k.activate(act, x.data(), weight.data(), kWidth, out.data());
    results.near("activation " + std::to_string((int)act), out.data(), kWidth);
  }
  k.softcap(5.0f, x.data(), kWidth, out.data());
  results.near("softcap", out.data(), kWidth);
  k.add(x.data(), bias.data(), kWidth, out.data());
  results.exact("add", out.data(), kWidth);
  k.add_scaled(x.data(), 0.3f, kWidth, out.data());
  results.near("add scaled", out.data(), kWidth);
  for (const bool interleaved : {false, true}) {
    k.rotate(out.data() + 1, weight.data(), bias.data(), 37, interleaved);
    results.near(interleaved ? "rotate pairs" : "rotate halves", out.data(), kWidth);
  }
}

void attention(const KernelTable& kernels, Numbers& numbers, Results& results) {
  constexpr int32_t kHeads = 4, kKvHeads = 2, kDim = 24, kBlock = 16;
  constexpr int64_t kTokens = 43, kRows = 5, kBlocks = 5, kWidth = kHeads * kDim;
  const AttentionKernels& k = kernels.attention;
  const int64_t table[] = {3, 0, 4};
  const std::vector<float> sinks = numbers.floats(kHeads), slopes = numbers.floats(kHeads);
  for (const KvKind kind : {KvKind::f32, KvKind::bf16, KvKind::int8, KvKind::fp8, KvKind::int4}) {
    const KvLayout layout{kind, kKvHeads, kDim, kBlock, kDim, false};
    const int64_t bytes = kBlocks * k.block_bytes(layout);
    const Memory<uint8_t> blocks(bytes), scratch(k.scratch_bytes);
    const KvMemory memory{layout, blocks.data()};
    for (int64_t t = 0; t < kTokens; t++)
      for (int32_t head = 0; head < kKvHeads; head++) {
        const std::vector<float> key = numbers.floats(kDim), value = numbers.floats(kDim);
        k.kv_write(memory, table[t / kBlock] * kBlock + t % kBlock, head, key.data(), value.data());
      }
    const std::string name = "attention " + std::to_string((int)kind);
    results.exact(name + " blocks", blocks.data(), bytes);
    const AttentionSpec spec{kHeads, 0.2f, 20, 8.0f, sinks.data(), slopes.data()};
    const SpanView span{0, kRows, kTokens, 0, table, 1};
    const std::vector<float> q = numbers.floats(kRows * kWidth, 4);
    std::vector<float> out(kRows * kWidth), parts(2 * kRows * kWidth);
    for (int32_t head = 0; head < kKvHeads; head++)
      k.attend(spec, memory, {span, head, 0, kRows, 0, kTokens}, nullptr, q.data(), kWidth, out.data(), kWidth, nullptr,
               scratch.data());
    const double bound = has_scales(kind) ? kQuantizedBound : kFloatBound;
    results.near(name, out.data(), kRows * kWidth, bound);
    const int64_t stride = kRows * (kHeads / kKvHeads) * (2 + kDim);
    for (int32_t head = 0; head < kKvHeads; head++) {
      const AttentionPart first{span, head, 0, kRows, 0, 32}, second{span, head, 0, kRows, 32, kTokens};
      k.attend(spec, memory, first, &second, q.data(), kWidth, nullptr, 0, parts.data(), scratch.data());
      k.attend(spec, memory, second, nullptr, q.data(), kWidth, nullptr, 0, parts.data() + stride, scratch.data());
      k.merge(spec, memory, span, out.data(), kWidth, head, 0, kRows, parts.data(), 2, stride);
    }
    results.near(name + " in parts", out.data(), kRows * kWidth, bound);
  }
}

void recurrent(const KernelTable& kernels, Numbers& numbers, Results& results) {
  constexpr int64_t kTokens = 70, kHeads = 2, kKeys = 12, kValues = 20, kWidth = kHeads * kValues;
  const RecurrentKernels& k = kernels.recurrent;
  std::vector<float> v = numbers.floats(kTokens * kWidth), z = numbers.floats(kTokens * kWidth), out(v.size());
  std::vector<float> q = numbers.floats(kTokens * kKeys), keys = numbers.floats(kTokens * kKeys);
  std::vector<float> gates = numbers.floats(kTokens * kHeads), state(kWidth * kKeys);
  const std::vector<float> weight = numbers.floats(kWidth * kKeys), rate(kWidth * kKeys, -0.5f);
  const Columns x{v.data(), kWidth}, to{out.data(), kWidth}, a{q.data(), kKeys}, b{keys.data(), kKeys};
  const Columns gate{gates.data(), kHeads}, step{z.data(), kWidth};
  const RecurrentSpan span{0, kTokens, true, state.data()};
  const auto keep = [&](const std::string& name) {
    results.near(name, out.data(), (int64_t)out.size());
    results.near(name + " state", state.data(), (int64_t)state.size());
  };
  for (const auto kind : {RecurrenceKind::ssd, RecurrenceKind::delta, RecurrenceKind::retention})
    for (const bool by_token : {false, true}) {
      const Recurrence r{kind,          kHeads,        1,    kKeys, kValues, rate.data(),
                         weight.data(), weight.data(), 0.0f, 2.0f};
      const Memory<uint8_t> scratch(k.recur_scratch_bytes(r));
      k.recur(r, {a, b, x, gate, gate, to}, span, 0, r.blocks(), by_token, scratch.data());
      keep("recurrence " + std::to_string((int)kind) + (by_token ? " by token" : ""));
    }
  k.selective_scan({kWidth, kKeys, rate.data(), weight.data()}, span, x, step, a, b, to, 0, kWidth, nullptr);
  keep("selective scan");
  k.convolve({kWidth, 4, weight.data(), weight.data(), true, Activation::silu}, span, x, to, 0, kWidth);
  keep("convolution");
  k.gated_norm({kWidth, 1e-6f, true}, v.data(), z.data(), weight.data(), out.data());
  keep("gated norm");
}

void sample(const KernelTable& kernels, Numbers& numbers, Results& results) {
  constexpr int64_t kVocab = 1003;
  const Memory<uint8_t> scratch(kernels.sample.scratch_bytes(kVocab));
  std::vector<int64_t> tokens;
  for (int i = 0; i < 64; i++) {
    const std::vector<float> logits = numbers.floats(kVocab, 6);
    SampleRow row{i % 4 ? 0.3f * (float)(i % 4) : 0.0f, i % 3 * 20, i % 5 ? 0.9 : 1.0, i % 2 ? 0.05 : 0.0,
                  numbers.next(),                       (uint64_t)i, 0, -1};
    kernels.sample.sample(row, logits.data(), kVocab, scratch.data());
    tokens.push_back(row.token);
  }
  results.exact("sampled tokens", tokens.data(), (int64_t)tokens.size());
}

// A head over looked-up rows, by three threads, as a tape; and what the pool does with subnormal numbers.
void tape(const KernelTable& kernels, Numbers& numbers, Results& results) {
  constexpr int64_t kVocab = 50, kWidth = 96, kTokens = 40;
  Pool pool(3);
  const Packed head(kernels, kFormats[2], kVocab, kWidth, numbers);
  Tape tape(kernels, &pool, false);
  Buffer* const x = tape.add_buffer(Rows::tokens, kWidth);
  tape.add(std::make_unique<Embed>(Table{head.matrix}, Embed::Ids::tokens, 1.0f, x));
  tape.add(std::make_unique<Linear>(head.matrix, Norm{}, Epilogue{}, Linear::Operands{x, nullptr, false, true},
                                    tape.linear_input(), false));
  std::vector<int64_t> ids, logit_rows;
  for (int64_t t = 0; t < kTokens; t++) ids.push_back(numbers.next() % kVocab), logit_rows.push_back(t);
  std::vector<float> logits(kTokens * 64);
  Step step{};
  step.token_ids = step.positions = ids.data(), step.logit_rows = logit_rows.data();
  step.logits = logits.data(), step.logits_stride = 64;
  for (const int64_t count : {kTokens, (int64_t)3}) {  // of three, some steps are run by one worker
    step.num_tokens = step.num_rows = count;
    for (int repeat = 0; repeat < 200; repeat++) tape.run(step, 0, tape.size(), nullptr);
    results.exact("tape of " + std::to_string(count), logits.data(), (int64_t)logits.size());
  }
  volatile float products[3] = {1e-30f, 1e-30f, 1e-30f};
  const auto multiply = [](void* all, int worker) {
    volatile float& x = static_cast<volatile float*>(all)[worker];
    x = x * 1e-10f;
  };
  pool.run(multiply, (void*)products);
  const float seen[3] = {products[0], products[1], products[2]};
  results.exact("subnormal numbers in the pool", seen, 3);
}

// Rounds of drafts of two and of three tokens: by the model that verifies, which is always right, by another one,
// and by lookups. The likeliest token is the last one, so these find loops.
void rounds(const KernelTable& kernels, Numbers& numbers, Results& results) {
  constexpr int64_t kVocab = 50, kWidth = 96, kRounds = 9, kTokens = 7, kBlock = 4, kBlocks = 12;
  Pool pool(3);
  const auto& format = kFormats[2];
  const Packed heads[2] = {{kernels, format, kVocab, kWidth, numbers}, {kernels, format, kVocab, kWidth, numbers}};
  Tape target(kernels, &pool, false), same(kernels, &pool, false), other(kernels, &pool, false);
  for (Tape* const tape : {&target, &same, &other}) {
    Buffer* const x = tape->add_buffer(Rows::tokens, kWidth);
    tape->add(std::make_unique<Embed>(Table{heads[0].matrix}, Embed::Ids::tokens, 1.0f, x));
    tape->add(std::make_unique<Linear>(heads[tape == &other].matrix, Norm{}, Epilogue{},
                                       Linear::Operands{x, nullptr, true, true}, tape->linear_input(), false));
    tape->need_scratch(kernels.sample.scratch_bytes(kVocab));
    tape->add(std::make_unique<Sample>(kVocab));
  }
  std::vector<int64_t> tables(2 * kBlocks), rows(kTokens);
  for (size_t i = 0; i < tables.size(); i++) tables[i] = (int64_t)(tables.size() - i);
  for (int64_t t = 0; t < kTokens; t++) rows[(size_t)t] = t;
  const std::vector<int64_t> tokens{1, 1, 1, 4, 4, 4, 4}, positions{5, 6, 7, 9, 10, 11, 12}, starts{0, 3};
  const std::vector<int64_t> lengths{3, 4}, ends{8, 13}, ones{1, 1}, firsts{0, 4}, begins{0, 1}, room{1000, 40};
  const std::vector<int64_t> slots(kTokens), none(1), never(2, 1000);
  std::vector<float> logits(kTokens * 64), own(2 * 64);
  for (const int kind : {0, 1, 2}) {
    std::vector<SampleRow> sampled;
    for (const int64_t t : rows)
      sampled.push_back({t < 3 || kind == 2 ? 0.0f : 8.0f, 0, 1.0, 0.0, 7, (uint64_t)(t < 3 ? t : t - 3), t, -1});
    Step step{};
    step.num_tokens = step.num_rows = step.num_sample_rows = kTokens, step.num_spans = 2;
    step.token_ids = tokens.data(), step.positions = positions.data(), step.logit_rows = rows.data();
    step.span_start = starts.data(), step.span_length = lengths.data(), step.kv_length = ends.data();
    step.bidirectional_block = ones.data(), step.sample_rows = sampled.data();
    step.logits = logits.data(), step.logits_stride = 64;
    step.groups = {{slots.data(), tables.data(), kBlocks, firsts.data()}};
    SuffixIndex texts[2] = {{{1, 2}, 1000, 1}, {{1, 2}, 1000, 1}};
    for (int i = 0; i < 2; i++) texts[i].extend(std::vector<int32_t>(9, i ? 4 : 1).data(), 9);
    Tape* const drafting = kind == 2 ? nullptr : kind == 1 ? &other : &same;
    RoundsDrafter drafter{{&texts[0], &texts[1]}, {0, 4, 0}, never.data(), drafting, {}, step.groups, begins.data(), 2,
                          own.data(), 64};
    drafter.chain.block_size = kBlock, drafter.chain.vocab_size = kVocab;
    std::vector<int64_t> ids(kRounds * kTokens), came(kRounds * kTokens);
    RoundsOptions options{kRounds, kBlock, room.data(), nullptr, 0, 0, none.data(), nullptr, 0, {}, ids.data(),
                          came.data(), kTokens, nullptr};
    const RoundsRun run = run_rounds(target, step, drafter, options);
    const int64_t counts[3] = {run.num_rounds, run.highest_slot, run.drafter_highest_slot};
    const std::string name = "rounds " + std::to_string(kind);
    results.exact(name, counts, 3);
    results.exact(name + ": tokens", ids.data(), run.num_rounds * kTokens);
    results.exact(name + ": sampled", came.data(), run.num_rounds * kTokens);
  }
}

// Two of five experts for each of many tokens and of a single one, by three threads.
void experts(const KernelTable& kernels, Numbers& numbers, Results& results) {
  constexpr int64_t kExperts = 5, kTopK = 2, kWidth = 96, kSize = 32, kTokens = 40;
  Pool pool(3);
  const auto packed = [&](int64_t outputs, int64_t inputs) {
    return Packed(kernels, kFormats[0], outputs, inputs, numbers);
  };
  const auto first = [](const Packed& all, int64_t outputs) {
    Matrix matrix = all.matrix;
    matrix.outputs = outputs, matrix.num_panels = outputs / kPanel;
    return matrix;
  };
  const Packed table = packed(kTokens, kWidth), router = packed(kExperts, kWidth);
  const Packed gate_up = packed(kExperts * 2 * kSize, kWidth), down = packed(kExperts * kWidth, kSize);
  Tape tape(kernels, &pool, false);
  Buffer *const x = tape.add_buffer(Rows::tokens, kWidth), *const out = tape.add_buffer(Rows::tokens, kWidth);
  Buffer* const logits = tape.add_buffer(Rows::tokens, kExperts);
  Buffer *const ids = tape.add_buffer(Rows::tokens, kTopK), *const weights = tape.add_buffer(Rows::tokens, kTopK);
  tape.add(std::make_unique<Embed>(Table{table.matrix}, Embed::Ids::tokens, 1.0f, x));
  tape.add(std::make_unique<Linear>(router.matrix, Norm{}, Epilogue{}, Linear::Operands{x, logits},
                                    tape.linear_input(), false));
  tape.add(std::make_unique<Route>(Route::Options{kTopK, true, true, 1.0f, 1, 1, false, nullptr},
                                   Route::Operands{logits, ids, weights}));
  const Epilogue gate{EpilogueKind::gate, Activation::silu, 0, nullptr, nullptr, 0};
  tape.add(std::make_unique<Experts>(kExperts, Experts::Product{first(gate_up, 2 * kSize), gate},
                                     Experts::Product{first(down, kWidth), Epilogue{}},
                                     Experts::Operands{x, ids, weights, out}, tape.experts_memory(), false));
  std::vector<int64_t> tokens(kTokens);
  for (int64_t t = 0; t < kTokens; t++) tokens[(size_t)t] = kTokens - 1 - t;
  for (const int64_t count : {kTokens, (int64_t)1}) {
    Step step{};
    step.num_tokens = count, step.token_ids = step.positions = tokens.data();
    tape.run(step, 0, tape.size(), nullptr);
    results.near("experts of " + std::to_string(count), out->data(), count * out->stride);
  }
}

struct Section {
  double bound;
  std::vector<char> bytes;
};

std::map<std::string, Section> read(const char* path) {
  std::ifstream in(path, std::ios::binary);
  std::map<std::string, Section> sections;
  std::string name, header;
  while (std::getline(in, name) && std::getline(in, header)) {
    Section& section = sections[name];
    size_t bytes = 0;
    std::istringstream(header) >> bytes >> section.bound;
    section.bytes.resize(bytes);
    in.read(section.bytes.data(), (std::streamsize)section.bytes.size());
  }
  if (sections.empty()) throw std::runtime_error(std::string("no results in ") + path);
  return sections;
}

// The largest difference, as a share of the largest value; infinite where anything is not finite.
double distance(const Section& a, const Section& b) {
  double largest = 0, error = 0;
  for (size_t i = 0; i + 4 <= a.bytes.size(); i += 4) {
    float x, y;
    std::memcpy(&x, a.bytes.data() + i, 4), std::memcpy(&y, b.bytes.data() + i, 4);
    if (!std::isfinite(x) || !std::isfinite(y)) return INFINITY;
    largest = std::fmax(largest, std::fabs(x));
    error = std::fmax(error, std::fabs((double)x - y));
  }
  return error / largest;
}

int compare(const char* a_path, const char* b_path) {
  const auto a = read(a_path), b = read(b_path);
  int different = a.size() != b.size();
  for (const auto& [name, section] : a) {
    const auto other = b.find(name);
    const bool fits = other != b.end() && other->second.bytes.size() == section.bytes.size();
    if (fits && other->second.bytes == section.bytes) continue;
    const double off = fits && section.bound > 0 ? distance(section, other->second) : INFINITY;
    if (off > section.bound)
      different++, std::cout << "different: " << name << ", by " << off << " of the largest value\n";
  }
  std::cout << a.size() << " results, " << different << " different\n";
  return different ? 1 : 0;
}

int write(const char* path) {
  std::ofstream out(path, std::ios::binary);
  Results results(out);
  Numbers numbers;
  const KernelTable& kernels = kernels_of("portable");
  linear(kernels, numbers, results);
  rows(kernels, numbers, results);
  attention(kernels, numbers, results);
  recurrent(kernels, numbers, results);
  sample(kernels, numbers, results);
  tape(kernels, numbers, results);
  rounds(kernels, numbers, results);
  experts(kernels, numbers, results);
  return out.flush() ? 0 : 1;
}

}  // namespace
}  // namespace ridgeline

int main(int argc, char** argv) {
  const std::string command = argc > 1 ? argv[1] : "";
  if (command == "write" && argc == 3) return ridgeline::write(argv[2]);
  if (command == "compare" && argc == 4) return ridgeline::compare(argv[2], argv[3]);
  std::cerr << "usage: smoke write FILE | smoke compare A B\n";
  return 2;
}
