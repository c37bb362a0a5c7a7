// The functions of one ISA level. Every level fills one table; the runtime picks a table and calls through it.
//
// All functions are safe to call from many threads at once on disjoint outputs, allocate nothing and throw nothing.
#pragma once

#include "kernels/types.h"

namespace ridgeline {

struct SampleRow;   // kernels/sample/types.h
struct SampleTeam;  // kernels/sample/types.h
struct AttentionItem;
struct Columns;  // this and the following: kernels/recurrent/types.h
struct RecurrentSpan;
struct Convolution;
struct SelectiveScan;
struct Recurrence;
struct RecurrenceRows;
struct GatedNorm;

struct LinearKernels {
  // Bytes of one panel of a matrix of this kind; `inputs` is K.
  int64_t (*panel_bytes)(WeightKind kind, int64_t inputs, int32_t group, bool has_zero_points);
  // Packs panels [begin, end). `rows` is row-major [., K]: float32, bfloat16, or one byte per value for int8 and int4
  // (unsigned, as stored). Packed output n is row order[n]; order[n] < 0 is an output of zeros. `scales` is
  // float32 [., G] ([., 1] for int8), `zero_points` uint8 [., G] or null.
  void (*pack)(const Matrix& matrix, const void* rows, const float* scales, const uint8_t* zero_points,
               const int64_t* order, int64_t begin, int64_t end);
  // The same of int4 whose codes come as words.
  void (*pack_words)(const Matrix& matrix, const Int4Words& words, const float* scales, const uint8_t* zero_points,
                     const int64_t* order, int64_t begin, int64_t end);
  // Packed output n as float32 [K].
  void (*unpack_output)(const Matrix& matrix, int64_t output, float* to);
  // Bytes that prepare_input needs for `rows` rows: a level's own form of the inputs, 64-byte aligned. At most `rows`
  // times that of one row, and kInputSlack.
  int64_t (*input_bytes)(const Matrix& matrix, int64_t rows);
  // Normalises rows [begin, end) of x (row r at x + (index ? index[r] : r) * stride) and brings them into the form in
  // which `multiply` reads them. `num_rows` is what input_bytes was asked for.
  void (*prepare_input)(const Matrix& matrix, const Norm& norm, const float* x, int64_t stride, const int64_t* index,
                        int64_t begin, int64_t end, int64_t num_rows, void* input);
  // Panels [begin, end) of x W^T for all rows, through the epilogue. `scratch` is the calling thread's alone.
  // A row's result does not depend on the other rows or on how panels are divided; `exact_batch` asks this also of
  // levels that have a faster kernel for many rows whose sums round differently (AMX with bfloat16).
  void (*multiply)(const Matrix& matrix, const void* input, int64_t num_rows, int64_t begin, int64_t end,
                   bool exact_batch, const Epilogue& epilogue, void* scratch);
  int64_t scratch_bytes;
  bool wide;   // a vector is half a panel, so that there are registers for several panels and for large blocks
  bool pairs;  // a product of pairs of bfloat16 is an instruction
  int32_t most_block_rows;  // of integer products in vectors
};

struct AttentionKernels {
  // Bytes of one block, keys and values together.
  int64_t (*block_bytes)(const KvLayout& layout);
  // Writes one token's k and v of one head; slot = block * block_size + offset. Writing offset 0 clears the block's
  // other tokens of that head first. Where the keys hold the values, v is neither read nor, in kv_read, written.
  void (*kv_write)(const KvMemory& memory, int64_t slot, int32_t head, const float* k, const float* v);
  // Fetches what kv_write will write there.
  void (*kv_fetch)(const KvMemory& memory, int64_t slot, int32_t head);
  // One token's k and v of one head as float32.
  void (*kv_read)(const KvMemory& memory, int64_t slot, int32_t head, float* k, float* v);
  // `q` and `out` are the step's float32 rows, num_heads times the entries of a key and of a value wide. With `partial`
  // null the result goes to `out`; otherwise the unnormalised sums go to `partial`: [rows * group][2 + value_dim]
  // float32, (running maximum, sum of weights, weighted values), for attend_merge. What `next`, unless null, will read
  // first is fetched.
  void (*attend)(const AttentionSpec& spec, const KvMemory& memory, const AttentionPart& part,
                 const AttentionPart* next, const float* q, int64_t q_stride, float* out, int64_t out_stride,
                 float* partial, void* scratch);
  // Merges `num_parts` partials, `part_stride` floats apart, in their order, and writes the rows to `out`.
  void (*merge)(const AttentionSpec& spec, const KvMemory& memory, const SpanView& span, float* out,
                int64_t out_stride, int32_t head, int64_t row_begin, int64_t row_end, const float* partials,
                int64_t num_parts, int64_t part_stride);
  int64_t scratch_bytes;
};

struct RowKernels {
  // One row normalised; x and out may be the same.
  void (*normalize)(const Norm& norm, const float* x, int64_t width, float* out);
  // Rotates entry i against entry i + half of x, or entry 2i against 2i + 1; cos and sin are [half].
  void (*rotate)(float* x, const float* cos, const float* sin, int64_t half, bool interleaved);
  void (*add)(const float* x, const float* y, int64_t width, float* out);
  void (*scale)(const float* x, float factor, int64_t width, float* out);
  float (*dot)(const float* x, const float* y, int64_t width);
  // out += factor * x.
  void (*add_scaled)(const float* x, float factor, int64_t width, float* out);
  void (*activate)(Activation activation, const float* x, const float* gated, int64_t width, float* out);
  void (*softcap)(float cap, const float* x, int64_t width, float* out);
};

struct RecurrentKernels {
  // Each computes a part of one span and takes its state, in place, to the span's end, or where the span is logged to
  // its beginning. A part's result does not depend on how channels or blocks are divided, as long as channels are
  // divided at multiples of 32. `scratch` is the calling thread's alone.
  void (*convolve)(const Convolution& conv, const RecurrentSpan& span, Columns x, Columns out, int64_t begin,
                   int64_t end);
  void (*selective_scan)(const SelectiveScan& scan, const RecurrentSpan& span, Columns x, Columns dt, Columns b,
                         Columns c, Columns out, int64_t begin, int64_t end, void* scratch);
  int64_t (*scan_scratch_bytes)(const SelectiveScan& scan);
  // Blocks [begin, end) of Recurrence::blocks(). `by_token` goes token by token also where chunks are faster, so that
  // the result does not depend on where a sequence is cut into spans.
  void (*recur)(const Recurrence& recurrence, const RecurrenceRows& rows, const RecurrentSpan& span, int64_t begin,
                int64_t end, bool by_token, void* scratch);
  int64_t (*recur_scratch_bytes)(const Recurrence& recurrence);
  // One row, or one group of it; `weight` is as wide.
  void (*gated_norm)(const GatedNorm& norm, const float* x, const float* z, const float* weight, float* out);
};

struct SampleKernels {
  // Decides one row; see kernels/sample/types.h.
  void (*sample)(SampleRow& row, const float* logits, int64_t vocab_size, void* scratch);
  int64_t (*scratch_bytes)(int64_t vocab_size);
  // Decides one row at a temperature and without top_k, called by all of a team: `own` is the caller's scratch, `all`
  // one that they share.
  void (*sample_share)(SampleRow& row, const float* logits, int64_t vocab_size, void* own, void* all,
                       const SampleTeam& team);
  // Writes the tokens of the k largest of more logits, in order; false where not all are finite. `maxima` are those that
  // `sample` left of finite ones, or null.
  bool (*likeliest)(const float* logits, int64_t vocab_size, const float* maxima, int64_t k, int64_t* ids, void* scratch);
  // Decides a row with a trial, and those that are verified together with it; logits have `stride` floats a row.
  void (*verify)(SampleRow* rows, const float* logits, int64_t stride, int64_t vocab_size, void* scratch);
};

struct ProbeKernels {
  // Reads every byte of a buffer once; the result depends on all of them.
  uint64_t (*read)(const uint8_t* from, int64_t bytes);
  // Runs `rounds` of a register-only loop of the level's best instruction for a kind of product; returns the
  // operations done (a multiply-add is two), 0 where the level has no such instruction.
  double (*peak)(InputKind kind, int64_t rounds);
  // The same for 8-bit inputs by int4 weights, null where no instruction is faster for them than for int8 weights.
  double (*peak_int4)(int64_t rounds);
  bool tiles;  // whether `peak` used a matrix unit
};

struct KernelTable {
  const char* name;
  LinearKernels linear;
  AttentionKernels attention;
  RowKernels rows;
  RecurrentKernels recurrent;
  SampleKernels sample;
  ProbeKernels probe;
};

}  // namespace ridgeline
