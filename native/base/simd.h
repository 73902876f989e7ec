// Vectors of 32 bytes: 8 floats or 4 doubles, in the compiler's own vector type, which every instruction set can run.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__AVX2__) && defined(__GNUC__) && !defined(__clang__)
// GCC's immintrin.h is read in half a second, for every file again, and these parts of it at once.
#define _IMMINTRIN_H_INCLUDED
#include <smmintrin.h>
#include <avxintrin.h>
#include <avx2intrin.h>
#elif defined(__AVX2__)
#include <immintrin.h>
#endif

#ifndef BELLMAX_ARCH
#error "compile with -DBELLMAX_ARCH=baseline or avx2"
#endif

// Declares a function that is compiled once for each instruction set, among which the binding chooses.
#define BELLMAX_KERNELS(...) \
    namespace baseline {     \
    __VA_ARGS__;             \
    }                        \
    namespace avx2 {         \
    __VA_ARGS__;             \
    }

// Each instruction set has its own copy of whatever is inline: the linker must not take one for the other.
namespace bellmax {
inline namespace BELLMAX_ARCH {

template <class To, class From>
inline To bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof(To));
    return to;
}

// A number, or the numbers of a vector, and integers of the same size.
template <class V>
struct Shape {
    using Real = V;
    using Int = std::conditional_t<sizeof(V) == 4, std::int32_t, std::int64_t>;
    using Bits = std::make_unsigned_t<Int>;
};

template <class R>
struct VectorOf {
    static constexpr int lanes = 32 / sizeof(R);
    typedef R type __attribute__((vector_size(32)));
};
template <class R>
using Vec = typename VectorOf<R>::type;
template <class R>
constexpr int lanes_of = VectorOf<R>::lanes;

template <>
struct Shape<Vec<float>> {
    using Real = float;
    typedef std::int32_t Int __attribute__((vector_size(32)));
    typedef std::uint32_t Bits __attribute__((vector_size(32)));
};

template <>
struct Shape<Vec<double>> {
    using Real = double;
    typedef std::int64_t Int __attribute__((vector_size(32)));
    typedef std::uint64_t Bits __attribute__((vector_size(32)));
};

template <class R>
inline Vec<R> broadcast(R x) {
    return x - Vec<R>{};  // x + 0 would have to turn −0 into 0
}

template <class R>
inline Vec<R> load(const R* from) {
    Vec<R> v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

// A vector, or a single number, from memory.
template <class V, class R>
inline V load_vector(const R* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

// As many numbers of another precision as a vector has lanes.
template <class S, int N>
struct PartOf {
    typedef S type __attribute__((vector_size(N * sizeof(S))));
};
template <class S, int N>
using Part = typename PartOf<S, N>::type;

// Each lane in another precision. GCC makes two halves of four floats or doubles, which the processor has in one.
template <class R, class S>
inline Part<R, 4> convert(Part<S, 4> v) {
#if defined(__AVX2__)
    if constexpr (sizeof(R) > sizeof(S)) return (Part<R, 4>)_mm256_cvtps_pd((__m128)v);
    if constexpr (sizeof(R) < sizeof(S)) return (Part<R, 4>)_mm256_cvtpd_ps((__m256d)v);
#endif
    return __builtin_convertvector(v, Part<R, 4>);
}

// From another precision.
template <class R, class S>
inline Vec<R> load_as(const S* from) {
    if constexpr (sizeof(R) == sizeof(S)) {
        return load<R>(from);
    } else if constexpr (sizeof(R) == 8 && sizeof(S) == 4) {
        return convert<R, S>(load_vector<Part<S, 4>>(from));
    } else {
        return __builtin_convertvector(load_vector<Part<S, lanes_of<R>>>(from), Vec<R>);
    }
}

template <class R>
inline void store(R* to, Vec<R> v) {
    std::memcpy(to, &v, sizeof v);
}

template <class S, class R>
inline void store_as(S* to, Vec<R> v) {
    if constexpr (sizeof(R) == sizeof(S)) {
        store<R>(to, v);
    } else if constexpr (sizeof(R) == 8 && sizeof(S) == 4) {
        const auto other = convert<S, R>(v);
        std::memcpy(to, &other, sizeof other);
    } else {
        const auto other = __builtin_convertvector(v, Part<S, lanes_of<R>>);
        std::memcpy(to, &other, sizeof other);
    }
}

// To an aligned place, without reading it first.
template <class R>
inline void store_past_caches(R* to, Vec<R> v) {
#if defined(__AVX2__)
    _mm256_stream_si256((__m256i*)to, (__m256i)v);
#else
    store<R>(to, v);
#endif
}

// What went past the caches is seen by other threads from here on.
inline void finish_writes() {
#if defined(__AVX2__)
    _mm_sfence();
#endif
}

// The first `count` lanes of a vector, which may be none or all.
template <class R>
struct First {
    int count;
#if defined(__AVX2__)
    __m256i mask;
#endif

    explicit First(std::int64_t n) : count(int(n < 0 ? 0 : n > lanes_of<R> ? lanes_of<R> : n)) {
#if defined(__AVX2__)
        if constexpr (sizeof(R) == 4) {
            mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
        } else {
            mask = _mm256_cmpgt_epi64(_mm256_set1_epi64x(count), _mm256_setr_epi64x(0, 1, 2, 3));
        }
#endif
    }

    // 0 in the other lanes, whose memory is not touched.
    Vec<R> load(const R* from) const {
#if defined(__AVX2__)
        if constexpr (sizeof(R) == 4) {
            return (Vec<R>)_mm256_maskload_ps(from, mask);
        } else {
            return (Vec<R>)_mm256_maskload_pd(from, mask);
        }
#else
        Vec<R> v{};
        for (int l = 0; l < count; ++l) v[l] = from[l];
        return v;
#endif
    }
};

template <class R>
inline Vec<R> load_some(const R* from, std::int64_t count) {
    return First<R>(count).load(from);
}

// From another precision.
template <class R, class S>
inline Vec<R> load_some_as(const S* from, std::int64_t count) {
    if constexpr (sizeof(R) == sizeof(S)) return load_some<R>(from, count);
    S all[lanes_of<R>] = {};
    for (std::int64_t l = 0; l < count && l < lanes_of<R>; ++l) all[l] = from[l];
    return load_as<R>(all);
}

// The first `count` entries, if so many.
template <class S, class R = S>
inline void store_some(S* to, Vec<R> v, std::int64_t count) {
    if (count <= 0) return;
    if (count >= lanes_of<R>) return store_as<S, R>(to, v);
    S all[lanes_of<R>];
    store_as<S, R>(all, v);
    const S* from = all;
    if (count & 4) std::memcpy(to, from, 4 * sizeof(S)), to += 4, from += 4;
    if (count & 2) std::memcpy(to, from, 2 * sizeof(S)), to += 2, from += 2;
    if (count & 1) *to = *from;
}

#if defined(__AVX2__)
// A mask of the lanes from `first` to `last`.
template <class R>
inline __m256i between(std::int64_t first, std::int64_t last) {
    constexpr std::int64_t lanes = lanes_of<R>;
    first = first < 0 ? 0 : first > lanes ? lanes : first;
    last = last < -1 ? -1 : last >= lanes ? lanes - 1 : last;
    if constexpr (sizeof(R) == 4) {
        const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        return _mm256_andnot_si256(_mm256_cmpgt_epi32(lane, _mm256_set1_epi32(int(last))),
                                   _mm256_cmpgt_epi32(lane, _mm256_set1_epi32(int(first) - 1)));
    } else {
        const __m256i lane = _mm256_setr_epi64x(0, 1, 2, 3);
        return _mm256_andnot_si256(_mm256_cmpgt_epi64(lane, _mm256_set1_epi64x(last)),
                                   _mm256_cmpgt_epi64(lane, _mm256_set1_epi64x(first - 1)));
    }
}
#endif

// The entries from `first` to `last`, counted from 0; elsewhere `outside`, and the memory there is not touched.
template <class R>
inline Vec<R> load_between(const R* from, std::int64_t first, std::int64_t last, R outside) {
#if defined(__AVX2__)
    if constexpr (sizeof(R) == 4) {
        const __m256i mask = between<R>(first, last);
        return (Vec<R>)_mm256_blendv_ps(_mm256_set1_ps(outside), _mm256_maskload_ps(from, mask), (__m256)mask);
    } else {
        const __m256i mask = between<R>(first, last);
        return (Vec<R>)_mm256_blendv_pd(_mm256_set1_pd(outside), _mm256_maskload_pd(from, mask), (__m256d)mask);
    }
#else
    Vec<R> v = broadcast<R>(outside);
    for (int l = 0; l < lanes_of<R>; ++l) {
        if (first <= l && l <= last) v[l] = from[l];
    }
    return v;
#endif
}

template <class R>
inline void store_between(R* to, Vec<R> v, std::int64_t first, std::int64_t last) {
#if defined(__AVX2__)
    if constexpr (sizeof(R) == 4) {
        _mm256_maskstore_ps(to, between<R>(first, last), (__m256)v);
    } else {
        _mm256_maskstore_pd(to, between<R>(first, last), (__m256d)v);
    }
#else
    for (int l = 0; l < lanes_of<R>; ++l) {
        if (first <= l && l <= last) to[l] = v[l];
    }
#endif
}

inline float square_root(float x) { return __builtin_sqrtf(x); }
inline double square_root(double x) { return __builtin_sqrt(x); }
template <class V>
inline V square_root(V x) {
    for (unsigned l = 0; l < sizeof(V) / sizeof(x[0]); ++l) x[l] = square_root(x[l]);
    return x;
}

// a > b ? a : b, which the processor has as one instruction and the compiler does not see.
template <class R>
inline Vec<R> greater(Vec<R> a, Vec<R> b) {
#if defined(__AVX2__)
    if constexpr (sizeof(R) == 4) {
        return (Vec<R>)_mm256_max_ps((__m256)a, (__m256)b);
    } else {
        return (Vec<R>)_mm256_max_pd((__m256d)a, (__m256d)b);
    }
#else
    return a > b ? a : b;
#endif
}

// a < b ? a : b, so b for a NaN.
template <class R>
inline Vec<R> lesser(Vec<R> a, Vec<R> b) {
#if defined(__AVX2__)
    if constexpr (sizeof(R) == 4) {
        return (Vec<R>)_mm256_min_ps((__m256)a, (__m256)b);
    } else {
        return (Vec<R>)_mm256_min_pd((__m256d)a, (__m256d)b);
    }
#else
    return a < b ? a : b;
#endif
}

// The greater and the lesser of two numbers or vectors; b if a is NaN.
inline float greater_of(float a, float b) { return a > b ? a : b; }
inline double greater_of(double a, double b) { return a > b ? a : b; }
inline Vec<float> greater_of(Vec<float> a, Vec<float> b) { return greater<float>(a, b); }
inline Vec<double> greater_of(Vec<double> a, Vec<double> b) { return greater<double>(a, b); }
inline float lesser_of(float a, float b) { return a < b ? a : b; }
inline double lesser_of(double a, double b) { return a < b ? a : b; }
inline Vec<float> lesser_of(Vec<float> a, Vec<float> b) { return lesser<float>(a, b); }
inline Vec<double> lesser_of(Vec<double> a, Vec<double> b) { return lesser<double>(a, b); }

// The same of integers of 32 bits.
inline Shape<Vec<float>>::Int greater_int(Shape<Vec<float>>::Int a, Shape<Vec<float>>::Int b) {
#if defined(__AVX2__)
    return (Shape<Vec<float>>::Int)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
    return a > b ? a : b;
#endif
}

// The nearest whole number, for magnitudes below 2^24.
inline Vec<float> rounded(Vec<float> x) {
#if defined(__AVX2__)
    return (Vec<float>)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    for (int l = 0; l < lanes_of<float>; ++l) x[l] = __builtin_nearbyintf(x[l]);
    return x;
#endif
}

inline Shape<Vec<float>>::Int to_int(Vec<float> x) { return __builtin_convertvector(x, Shape<Vec<float>>::Int); }

inline bool any(bool mask) { return mask; }

// Whether the mask of a lane is set.
template <class Mask>
inline bool any(Mask mask) {
#if defined(__AVX2__)
    return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
    std::int64_t words[4], all = 0;
    std::memcpy(words, &mask, sizeof words);
    for (std::int64_t word : words) all |= word;
    return all != 0;
#endif
}

// The lowest byte of each lane, the first lane lowest.
inline std::uint32_t low_bytes(Shape<Vec<double>>::Int v) {
#if defined(__AVX2__)
    const __m256i even = _mm256_permutevar8x32_epi32((__m256i)v, _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6));
    const __m128i bytes = _mm_shuffle_epi8(_mm256_castsi256_si128(even), _mm_set1_epi32(0x0c080400));
    return std::uint32_t(_mm_cvtsi128_si32(bytes));
#else
    return std::uint32_t(v[0] | v[1] << 8 | v[2] << 16 | v[3] << 24);
#endif
}

// The lanes of a vector whose numbers are given: lanes of a come first, then lanes of b.
template <int... places, class V>
__attribute__((always_inline)) inline auto shuffled(V a, V b) {
#if defined(__clang__) || __GNUC__ >= 12
    return __builtin_shufflevector(a, b, places...);
#else
    constexpr int lanes = sizeof(V) / sizeof(a[0]);
    typedef std::decay_t<decltype(a[0])> Result __attribute__((vector_size(sizeof(a[0]) * sizeof...(places))));
    return Result{(places < lanes ? a[places % lanes] : b[places % lanes])...};
#endif
}

// lane l of v[k] and lane k of v[l] change places.
__attribute__((always_inline)) inline void transpose(Vec<float>* v) {
    Vec<float> a[8], b[8];
#pragma GCC unroll 8
    for (int k = 0; k < 8; k += 2) {
        a[k] = shuffled<0, 8, 1, 9, 4, 12, 5, 13>(v[k], v[k + 1]);
        a[k + 1] = shuffled<2, 10, 3, 11, 6, 14, 7, 15>(v[k], v[k + 1]);
    }
#pragma GCC unroll 8
    for (int k = 0; k < 8; k += 4) {
#pragma GCC unroll 8
        for (int n = 0; n < 2; ++n) {
            b[k + 2 * n] = shuffled<0, 1, 8, 9, 4, 5, 12, 13>(a[k + n], a[k + n + 2]);
            b[k + 2 * n + 1] = shuffled<2, 3, 10, 11, 6, 7, 14, 15>(a[k + n], a[k + n + 2]);
        }
    }
#pragma GCC unroll 8
    for (int k = 0; k < 4; ++k) {
        v[k] = shuffled<0, 1, 2, 3, 8, 9, 10, 11>(b[k], b[k + 4]);
        v[k + 4] = shuffled<4, 5, 6, 7, 12, 13, 14, 15>(b[k], b[k + 4]);
    }
}

__attribute__((always_inline)) inline void transpose(Vec<double>* v) {
    Vec<double> a[4];
#pragma GCC unroll 8
    for (int k = 0; k < 4; k += 2) {
        a[k] = shuffled<0, 4, 2, 6>(v[k], v[k + 1]);
        a[k + 1] = shuffled<1, 5, 3, 7>(v[k], v[k + 1]);
    }
#pragma GCC unroll 8
    for (int k = 0; k < 2; ++k) {
        v[k] = shuffled<0, 1, 4, 5>(a[k], a[k + 2]);
        v[k + 2] = shuffled<2, 3, 6, 7>(a[k], a[k + 2]);
    }
}

// As many vectors as there are lanes into one: lane l has the sum of the lanes of v[l].
template <class R>
__attribute__((always_inline)) inline Vec<R> sum_rows(Vec<R>* v) {
    transpose(v);
    Vec<R> sum = v[0];
#pragma GCC unroll 8
    for (int k = 1; k < lanes_of<R>; ++k) sum += v[k];
    return sum;
}

// Combines the lanes; every lane gets the result.
template <class Op>
inline Vec<float> across_lanes(Vec<float> v, Op op) {
    v = op(v, shuffled<4, 5, 6, 7, 0, 1, 2, 3>(v, v));
    v = op(v, shuffled<2, 3, 0, 1, 6, 7, 4, 5>(v, v));
    return op(v, shuffled<1, 0, 3, 2, 5, 4, 7, 6>(v, v));
}
template <class Op>
inline Vec<double> across_lanes(Vec<double> v, Op op) {
    v = op(v, shuffled<2, 3, 0, 1>(v, v));
    return op(v, shuffled<1, 0, 3, 2>(v, v));
}
template <class R>
inline Vec<R> greatest_lane(Vec<R> v) {
    return across_lanes(v, [](Vec<R> a, Vec<R> b) { return greater<R>(a, b); });
}
template <class R>
inline Vec<R> least_lane(Vec<R> v) {
    return across_lanes(v, [](Vec<R> a, Vec<R> b) { return lesser<R>(a, b); });
}
template <class R>
inline Vec<R> sum_lanes(Vec<R> v) {
    return across_lanes(v, [](Vec<R> a, Vec<R> b) { return a + b; });
}

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
