// Kernels of recurrent layers whose channels go their own ways: causal convolution, selective scan, gated norm.
#pragma once

#include "kernels/recurrent/lanes.h"
#include "kernels/recurrent/types.h"
#include "kernels/rows.h"

namespace ridgeline::RIDGELINE_LEVEL::recurrent {

// log(1 + u) for 0 <= u <= 1, to the last digits also where u is small: Cephes' logf around 1 and around 2.
RL_INLINE Floats log1p(Floats u) {
  const auto high = u > 0.41421356f;
  const Floats z = high ? 0.5f * (u - 1.0f) : u, s = z * z;
  Floats p = splat(7.0376836292e-2f);
  p = fma(p, z, splat(-1.1514610310e-1f));
  p = fma(p, z, splat(1.1676998740e-1f));
  p = fma(p, z, splat(-1.2420140846e-1f));
  p = fma(p, z, splat(1.4249322787e-1f));
  p = fma(p, z, splat(-1.6668057665e-1f));
  p = fma(p, z, splat(2.0000714765e-1f));
  p = fma(p, z, splat(-2.4999993993e-1f));
  p = fma(p, z, splat(3.3333331174e-1f));
  const Floats y = fma(p * z, s, -0.5f * s) + z;
  return high ? y + 0.69314718056f : y;
}

// log(1 + e^x)
RL_INLINE Floats softplus(Floats x) {
  const Floats magnitude = x < 0.0f ? -x : x;
  return max(x, Floats{}) + log1p(exp(-magnitude));
}

RL_INLINE Floats sigmoid(Floats x) { return 1.0f / (1.0f + exp(-x)); }

inline constexpr int64_t kConvChannels = 128;  // whose past fits in the nearest cache

// Channels [begin, end) of a span. Not in place.
static inline void convolve(const Convolution& conv, const RecurrentSpan& span, Columns x, Columns out, int64_t begin,
                            int64_t end) {
  const int64_t history = conv.taps - 1;
  alignas(64) float before[Convolution::kMaxTaps - 1][kConvChannels];
  for (int64_t first = begin; first < end; first += kConvChannels) {
    const int64_t width = end - first < kConvChannels ? end - first : kConvChannels;
    float* state = span.state + first * history;
    for (int64_t c = 0; c < width; c++)
      for (int64_t i = 0; i < history; i++) before[i][c] = span.begins ? 0.0f : state[c * history + i];
    for (int64_t i = 0; i < history && span.pending; i++) {
      const int64_t at = i + span.pending;
      const float* from = at < history ? before[at] : span.log.row(span.start - history + i) + first;
      __builtin_memcpy(before[i], from, (size_t)width * sizeof(float));
    }
    // Token `t` of the span, which is one before it where t < 0.
    const auto token = [&](int64_t t) { return t < 0 ? before[history + t] : x.row(span.first_row + t) + first; };
    for (int64_t t = 0; t < span.length; t++) {
      const float* seen[Convolution::kMaxTaps];
      for (int64_t i = 0; i <= history; i++) seen[i] = token(t - history + i);
      float* to = out.row(span.first_row + t) + first;
      for_vectors(width, [&](int64_t c, int64_t count) {
        Floats y = conv.bias ? load_first(conv.bias + first + c, count) : Floats{};
        for (int64_t i = 0; i <= history; i++)
          y = fma(load_first(conv.weight + i * conv.channels + first + c, count), load_first(seen[i] + c, count), y);
        store_first(to + c, conv.has_activation ? apply(conv.activation, y) : y, count);
      });
    }
    for (int64_t i = 0; i < history; i++) {
      const float* last = token((span.logs ? 0 : span.length) - history + i);
      for (int64_t c = 0; c < width; c++) state[c * history + i] = last[c];
    }
  }
}

// One token of `count` <= kLanes channels: h <- exp(dt A) h + dt x B, and y = C h + D x for each.
RL_INLINE Floats scan_token(const SelectiveScan& scan, float* state, int64_t first, int64_t count, Floats x, Floats dt,
                            const float* b, const float* c) {
  alignas(64) float steps[kLanes], inputs[kLanes];
  store(steps, dt), store(inputs, dt * x);
  Floats products[kLanes] = {};
  const float* rate = scan.rate + first * scan.size;
  for (int64_t i = 0; i < count; i++)
    for_vectors(scan.size, [&](int64_t n, int64_t rest) {
      const int64_t at = i * scan.size + n;
      const Floats decay = exp(steps[i] * load_first(rate + at, rest));
      const Floats h = fma(decay, load_first(state + at, rest), inputs[i] * load_first(b + n, rest));
      store_first(state + at, h, rest);
      products[i] = fma(h, load_first(c + n, rest), products[i]);
    });
  return fma(load_first(scan.skip + first, count), x, sums_of(products));
}

static inline int64_t scan_scratch_bytes(const SelectiveScan& scan) { return kLanes * scan.size * (int64_t)sizeof(float); }

// Channels [begin, end) of a span.
static inline void selective_scan(const SelectiveScan& scan, const RecurrentSpan& span, Columns x, Columns dt,
                                  Columns b, Columns c, Columns out, int64_t begin, int64_t end, void* scratch) {
  const Columns old_x = span.log.columns(0), old_dt = span.log.columns(scan.channels);
  const Columns old_b = span.log.columns(2 * scan.channels);
  for (int64_t first = begin; first < end; first += kLanes) {
    const int64_t count = end - first < kLanes ? end - first : kLanes;
    float* state = span.state + first * scan.size;
    const size_t bytes = (size_t)(count * scan.size) * sizeof(float);
    if (span.begins) __builtin_memset(state, 0, bytes);
    const auto token = [&](Columns x, Columns dt, Columns b, Columns c, int64_t t) {
      const Floats step = softplus(load_first(dt.row(t) + first, count));
      return scan_token(scan, state, first, count, load_first(x.row(t) + first, count), step, b.row(t), c.row(t));
    };
    span.for_pending([&](int64_t row) { token(old_x, old_dt, old_b, old_b, row); });
    if (span.logs) state = (float*)__builtin_memcpy(scratch, state, bytes);
    for (int64_t t = span.first_row; t < span.first_row + span.length; t++)
      store_first(out.row(t) + first, token(x, dt, b, c, t), count);
  }
}

// Not in place.
static inline void gated_norm(const GatedNorm& norm, const float* x, const float* z, const float* weight, float* out) {
  const auto gate = [&](int64_t i, int64_t count) { return apply(Activation::silu, load_first(z + i, count)); };
  Floats squares{};
  for_vectors(norm.width, [&](int64_t i, int64_t count) {
    Floats y = load_first(x + i, count);
    if (!norm.norm_before_gate) y *= gate(i, count);
    squares = fma(y, y, squares);
    store_first(out + i, y, count);
  });
  const float factor = 1.0f / square_root(sum(squares) / (float)norm.width + norm.eps);
  for_vectors(norm.width, [&](int64_t i, int64_t count) {
    Floats y = load_first(out + i, count) * factor * load_first(weight + i, count);
    if (norm.norm_before_gate) y *= gate(i, count);
    store_first(out + i, y, count);
  });
}

}  // namespace ridgeline::RIDGELINE_LEVEL::recurrent
