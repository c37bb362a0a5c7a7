// Kernels over single float32 rows: norms, rotary embedding, activations.
#pragma once

#include <utility>

#include "kernels/simd.h"
#include "kernels/types.h"

namespace ridgeline::RIDGELINE_LEVEL {

// Calls body(vector, offset) over whole vectors, and scalar(offset) over the rest.
template <class Body, class Scalar>
RL_INLINE void for_row(int64_t width, Body body, Scalar scalar) {
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) body(i);
  for (; i < width; i++) scalar(i);
}

RL_INLINE float square_root(float x) { return __builtin_sqrtf(x); }

// Sums run in a fixed order that depends on the width alone.
RL_INLINE float row_sum(const float* x, int64_t width) {
  Floats total{};
  float rest = 0;
  for_row(width, [&](int64_t i) { total += load<Floats>(x + i); }, [&](int64_t i) { rest += x[i]; });
  return sum(total) + rest;
}

RL_INLINE float row_squares(const float* x, int64_t width, float mean) {
  Floats total{};
  float rest = 0;
  for_row(
      width,
      [&](int64_t i) {
        const Floats d = load<Floats>(x + i) - mean;
        total = fma(d, d, total);
      },
      [&](int64_t i) { rest += (x[i] - mean) * (x[i] - mean); });
  return sum(total) + rest;
}

// In a fixed order that depends on the width alone.
static inline float dot(const float* x, const float* y, int64_t width) {
  Floats total{};
  float rest = 0;
  for_row(
      width, [&](int64_t i) { total = fma(load<Floats>(x + i), load<Floats>(y + i), total); },
      [&](int64_t i) { rest += x[i] * y[i]; });
  return sum(total) + rest;
}

// What normalises a row, given all of it: out = (x - mean) * factor * weight + bias.
struct RowScale {
  float mean, factor;
};

static inline RowScale row_scale(const Norm& norm, const float* x, int64_t width) {
  if (norm.kind == NormKind::none) return {0.0f, 1.0f};
  const float mean = norm.kind == NormKind::layer ? row_sum(x, width) / (float)width : 0.0f;
  return {mean, 1.0f / square_root(row_squares(x, width, mean) / (float)width + norm.eps)};
}

// Entries [begin, begin + width) of a row, to out[0, width).
static inline void normalize_part(const Norm& norm, RowScale scale, const float* x, int64_t begin, int64_t width,
                                  float* out) {
  x += begin;
  if (norm.kind == NormKind::none) {
    if (out != x) __builtin_memcpy(out, x, (size_t)width * sizeof(float));
    return;
  }
  const float* weight = norm.weight + begin;
  const float* bias = norm.bias ? norm.bias + begin : nullptr;
  for_row(
      width,
      [&](int64_t i) {
        Floats y = (load<Floats>(x + i) - scale.mean) * scale.factor * load<Floats>(weight + i);
        if (bias) y += load<Floats>(bias + i);
        store(out + i, y);
      },
      [&](int64_t i) { out[i] = (x[i] - scale.mean) * scale.factor * weight[i] + (bias ? bias[i] : 0.0f); });
}

static inline void normalize(const Norm& norm, const float* x, int64_t width, float* out) {
  normalize_part(norm, row_scale(norm, x, width), x, 0, width, out);
}

static inline void rotate_halves(float* a, const float* cos, const float* sin, int64_t half) {
  float* b = a + half;
  for_row(
      half,
      [&](int64_t i) {
        const Floats x = load<Floats>(a + i), y = load<Floats>(b + i);
        const Floats c = load<Floats>(cos + i), s = load<Floats>(sin + i);
        store(a + i, x * c - y * s);
        store(b + i, y * c + x * s);
      },
      [&](int64_t i) {
        const float x = a[i], y = b[i];
        a[i] = x * cos[i] - y * sin[i];
        b[i] = y * cos[i] + x * sin[i];
      });
}

// Lanes from + i / 2 of v: each of half of them twice.
template <int From, int... Lane>
RL_INLINE Floats doubled(Floats v, std::integer_sequence<int, Lane...>) {
  return __builtin_shufflevector(v, v, (From + Lane / 2)...);
}

template <int... Lane>
RL_INLINE Floats pairs_swapped(Floats v, std::integer_sequence<int, Lane...>) {
  return __builtin_shufflevector(v, v, (Lane ^ 1)...);
}

static inline void rotate_pairs(float* x, const float* cos, const float* sin, int64_t half) {
  constexpr auto lanes = std::make_integer_sequence<int, kLanes>{};
  Floats sign;
  for (int lane = 0; lane < kLanes; lane++) sign[lane] = lane % 2 ? 1.0f : -1.0f;
  const auto turn = [&](float* at, Floats c, Floats s) {
    const Floats v = load<Floats>(at);
    store(at, v * c + pairs_swapped(v, lanes) * (s * sign));
  };
  for_row(
      half,
      [&](int64_t i) {
        const Floats c = load<Floats>(cos + i), s = load<Floats>(sin + i);
        turn(x + 2 * i, doubled<0>(c, lanes), doubled<0>(s, lanes));
        turn(x + 2 * i + kLanes, doubled<kLanes / 2>(c, lanes), doubled<kLanes / 2>(s, lanes));
      },
      [&](int64_t i) {
        const float a = x[2 * i], b = x[2 * i + 1];
        x[2 * i] = a * cos[i] - b * sin[i];
        x[2 * i + 1] = b * cos[i] + a * sin[i];
      });
}

static inline void rotate(float* x, const float* cos, const float* sin, int64_t half, bool interleaved) {
  if (interleaved) rotate_pairs(x, cos, sin, half);
  else rotate_halves(x, cos, sin, half);
}

static inline void add(const float* x, const float* y, int64_t width, float* out) {
  for_row(
      width, [&](int64_t i) { store(out + i, load<Floats>(x + i) + load<Floats>(y + i)); },
      [&](int64_t i) { out[i] = x[i] + y[i]; });
}

static inline void scale(const float* x, float factor, int64_t width, float* out) {
  for_row(
      width, [&](int64_t i) { store(out + i, load<Floats>(x + i) * factor); },
      [&](int64_t i) { out[i] = x[i] * factor; });
}

static inline void add_scaled(const float* x, float factor, int64_t width, float* out) {
  for_row(
      width, [&](int64_t i) { store(out + i, load<Floats>(out + i) + load<Floats>(x + i) * factor); },
      [&](int64_t i) { out[i] += x[i] * factor; });
}

// tanh(x) = 1 - 2 / (e^2x + 1); near 0 a polynomial, where the difference would lose digits.
RL_INLINE Floats tanh(Floats x) {
  const Floats wide = 1.0f - 2.0f / (exp(2.0f * min(max(x, splat(-10.0f)), splat(10.0f))) + 1.0f);
  const Floats s = x * x;
  Floats p = splat(-5.70498872745e-3f);
  p = fma(p, s, splat(2.06390887954e-2f));
  p = fma(p, s, splat(-5.37397155531e-2f));
  p = fma(p, s, splat(1.33314422036e-1f));
  p = fma(p, s, splat(-3.33332819422e-1f));
  const Floats near = fma(p * s, x, x);
  const Floats magnitude = x < 0.0f ? -x : x;
  const Floats y = magnitude < 0.625f ? near : wide;
  return x != x ? x : y;
}

// erfc(x) for x >= 0 by Abramowitz and Stegun 7.1.26, |error| < 1.5e-7.
RL_INLINE Floats erfc(Floats x) {
  const Floats t = 1.0f / fma(x, splat(0.3275911f), splat(1.0f));
  Floats p = splat(1.061405429f);
  p = fma(p, t, splat(-1.453152027f));
  p = fma(p, t, splat(1.421413741f));
  p = fma(p, t, splat(-0.284496736f));
  p = fma(p, t, splat(0.254829592f));
  return p * t * exp(-x * x);
}

// erf(x) for |x| < 1 by Cephes' polynomial, within 2 units in the last place.
RL_INLINE Floats erf_near_0(Floats x) {
  const Floats s = x * x;
  Floats p = splat(7.853861353153693e-5f);
  p = fma(p, s, splat(-8.010193625184903e-4f));
  p = fma(p, s, splat(5.188327685732524e-3f));
  p = fma(p, s, splat(-2.685381193529856e-2f));
  p = fma(p, s, splat(1.128358514861418e-1f));
  p = fma(p, s, splat(-3.761262582423300e-1f));
  p = fma(p, s, splat(1.128379165726710f));
  return x * p;
}

// x * Phi(x) = x * erfc(-x / sqrt(2)) / 2; where that is small it is not made by a difference to 1.
RL_INLINE Floats gelu(Floats x) {
  const Floats z = x * 0.70710678118654752f, magnitude = z < 0.0f ? -z : z;
  const Floats tail = 0.5f * erfc(magnitude);
  const Floats far = z < 0.0f ? tail : 1.0f - tail;
  return x * (magnitude < 1.0f ? fma(erf_near_0(z), splat(0.5f), splat(0.5f)) : far);
}

RL_INLINE Floats apply(Activation activation, Floats x) {
  switch (activation) {
    case Activation::silu:
      return x / (1.0f + exp(-x));
    case Activation::gelu:
      return gelu(x);
    case Activation::gelu_tanh:  // (1 + tanh(u)) / 2 = 1 / (1 + e^-2u)
      return x / (1.0f + exp(-1.59576912160573072f * fma(0.044715f * x * x, x, x)));
    case Activation::quick_gelu:
      return x / (1.0f + exp(-1.702f * x));
    case Activation::relu:
      return x < 0.0f ? Floats{} : x;  // keeps a NaN
    case Activation::relu2:
      return x < 0.0f ? Floats{} : x * x;
    case Activation::sigmoid:
      return 1.0f / (1.0f + exp(-x));
  }
  __builtin_unreachable();
}

// act(x), times `gated` where that is not null.
static inline void activate(Activation activation, const float* x, const float* gated, int64_t width, float* out) {
  const auto vector = [&](Floats v, Floats g) { return gated ? apply(activation, v) * g : apply(activation, v); };
  for_row(
      width,
      [&](int64_t i) { store(out + i, vector(load<Floats>(x + i), gated ? load<Floats>(gated + i) : Floats{})); },
      [&](int64_t i) { out[i] = vector(splat(x[i]), splat(gated ? gated[i] : 0.0f))[0]; });
}

static inline void softcap(float cap, const float* x, int64_t width, float* out) {
  for_row(
      width, [&](int64_t i) { store(out + i, cap * tanh(load<Floats>(x + i) / cap)); },
      [&](int64_t i) { out[i] = (cap * tanh(splat(x[i]) / cap))[0]; });
}

}  // namespace ridgeline::RIDGELINE_LEVEL
