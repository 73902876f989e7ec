// exp and log to the base 2, without branches or calls, of a number or of a vector of the compiler's (simd.h).
// Accurate to 2 ulp (tests/backends/test_native.py measures it).
#pragma once

#include <limits>

#include "simd.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {

constexpr double power_of_ln2(int k) {
    double power = 1;
    for (int i = 0; i < k; ++i) power *= 0.693147180559945309417232;
    return power;
}

template <class S>
struct Format;

template <>
struct Format<float> {
    using Int = std::int32_t;
    static constexpr int mantissa = 23, bias = 127, exp_terms = 6, log_terms = 5;
    static constexpr float round = 12582912.0f;  // 1.5 * 2^23
    // The best polynomial for exp on [−ln 2/2, ln 2/2]: 2e-9.
    static constexpr float exp_series(int k) {
        constexpr float series[] = {1,          1,           0.499999921f, 0.166664202f,
                                    0.0416682256f, 0.00837481591f, 0.0013836846f};
        return series[k];
    }
};

template <>
struct Format<double> {
    using Int = std::int64_t;
    static constexpr int mantissa = 52, bias = 1023, exp_terms = 11, log_terms = 11;
    static constexpr double round = 6755399441055744.0;  // 1.5 * 2^52
    // The best polynomial, as above: 3e-18.
    static constexpr double exp_series(int k) {
        constexpr double series[] = {1,
                                     1,
                                     0.50000000000000176856,
                                     0.16666666666666168664,
                                     0.041666666666492767295,
                                     0.0083333333335592713357,
                                     0.0013888888951223988291,
                                     0.00019841269432679236866,
                                     0.000024801486521427463949,
                                     2.7557622530872254657e-6,
                                     2.7632293279459875375e-7,
                                     2.4994304884817207301e-8};
        return series[k];
    }
};

// The terms of 2^x, in an array: GCC folds the loops above only under -O3, and would run them for every vector.
template <class S>
struct Exp2Series {
    S terms[Format<S>::exp_terms + 1] = {};

    constexpr Exp2Series() {
        for (int k = 0; k <= Format<S>::exp_terms; ++k) terms[k] = S(Format<S>::exp_series(k) * power_of_ln2(k));
    }
};
template <class S>
constexpr Exp2Series<S> exp2_series;

// 2^x for x ≤ 127 (double: 1023); 0 below −127 (−1023), for −∞ and for NaN. Results between are denormal,
// or 0 if the processor flushes denormals.
template <class V>
inline V exp2_of(V x) {
    using F = Format<typename Shape<V>::Real>;
    using S = typename Shape<V>::Real;
    using Bits = typename Shape<V>::Bits;
    const V clamped = greater_of(x, V{} - S(F::bias));
    const V shifted = clamped + F::round, f = clamped - (shifted - F::round);
    // The even and the odd terms, in two chains of multiplications that do not wait for each other.
    constexpr const S* terms = exp2_series<S>.terms;
    const V square = f * f;
    V p = V{} + terms[F::exp_terms], other = V{} + terms[F::exp_terms - 1];
#pragma GCC unroll 16
    for (int k = F::exp_terms - 2; k > 0; k -= 2) {
        p = p * square + terms[k];
        other = other * square + terms[k - 1];
    }
    p = F::exp_terms % 2 ? p * f + other : p * square + other * f + terms[0];
    // The nearest integer is in the low bits of `shifted`; it is added to the exponent, and leaves 0 of 1 at the least.
    return bits<V>(bits<Bits>(p) + (bits<Bits>(shifted) << F::mantissa));
}

#if defined(__AVX2__)
// The same for floats, by a table of the eighths and a cubic: fewer of the multiplications that others wait for.
inline Vec<float> exp2_of(Vec<float> x) {
    typedef std::int32_t Ints __attribute__((vector_size(32)));
    constexpr float round = 1.5f * (1 << 20);  // to eighths
    // 2^(i/8), less the i that the low bits of the rounded number add to the exponent.
    const Ints table = {0x3f800000,           0x3f8b95c2 - (1 << 20), 0x3f9837f0 - (2 << 20), 0x3fa5fed7 - (3 << 20),
                        0x3fb504f3 - (4 << 20), 0x3fc5672a - (5 << 20), 0x3fd744fd - (6 << 20), 0x3feac0c7 - (7 << 20)};
    const Vec<float> clamped = greater<float>(x, Vec<float>{} - 127.0f);
    const Vec<float> shifted = clamped + round, f = clamped - (shifted - round);
    const __m256i root = _mm256_permutevar8x32_epi32((__m256i)table, (__m256i)shifted);
    const Vec<float> scale = (Vec<float>)_mm256_add_epi32(root, _mm256_slli_epi32((__m256i)shifted, 20));
    return scale * (((0.0554989018f * f + 0.240264073f) * f + 0.693147182f) * f + 1.0f);
}
#endif

// log2(x) for positive normal x; −∞ at 0.
template <class V>
inline V log2_of(V x) {
    using F = Format<typename Shape<V>::Real>;
    using S = typename Shape<V>::Real;
    using Bits = typename Shape<V>::Bits;
    using Word = std::make_unsigned_t<typename F::Int>;
    constexpr S two_over_ln2 = S(2.885390081777926814719849362);
    constexpr Word one = Word(F::bias) << F::mantissa;
    const Word low = bits<Word>(S(0.70710678118654752)) - one;
    // Biased so that it is never negative: vector units shift only unsigned numbers.
    const Bits exponent = (bits<Bits>(x) - low) >> F::mantissa;
    const V m = bits<V>(bits<Bits>(x) - ((exponent - Word(F::bias)) << F::mantissa));  // in [sqrt(1/2), sqrt(2))
    // The exponent as a number, by the bits of round + exponent: conversions of 64-bit integers are slow.
    const V n = (bits<V>(bits<Word>(F::round) + exponent) - F::round) - S(F::bias);
    const V s = (m - 1) / (m + 1), z = s * s;
    V p = V{} + S(1) / S(2 * F::log_terms + 1);
#pragma GCC unroll 16
    for (int k = F::log_terms - 1; k > 0; --k) p = p * z + S(1) / S(2 * k + 1);  // atanh(s) = s (1 + z/3 + z²/5 + …)
    const V result = n + (two_over_ln2 * s * (z * p) + two_over_ln2 * s);
    return x > V{} ? result : V{} - std::numeric_limits<S>::infinity();
}

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
