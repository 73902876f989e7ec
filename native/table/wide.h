// Doubles in as many lanes as a vector of floats or doubles has: what must not lose digits beside what may.
#pragma once

#include "../base/simd.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {

template <int W>
struct Wide {
    static constexpr int parts = W / lanes_of<double>;
    Vec<double> part[parts];
};

// op of the parts of one or several.
template <int W, class Op, class... Others>
inline Wide<W> each(Op op, const Wide<W>& a, const Others&... others) {
    Wide<W> result;
    for (int p = 0; p < Wide<W>::parts; ++p) result.part[p] = op(a.part[p], others.part[p]...);
    return result;
}

template <int W>
inline Wide<W> operator+(const Wide<W>& a, const Wide<W>& b) {
    return each([](Vec<double> x, Vec<double> y) { return x + y; }, a, b);
}
template <int W>
inline Wide<W> operator-(const Wide<W>& a, const Wide<W>& b) {
    return each([](Vec<double> x, Vec<double> y) { return x - y; }, a, b);
}
template <int W>
inline Wide<W> operator*(const Wide<W>& a, const Wide<W>& b) {
    return each([](Vec<double> x, Vec<double> y) { return x * y; }, a, b);
}

template <int W>
inline Wide<W> wide(double x) {
    return each([x](Vec<double> zero) { return zero + x; }, Wide<W>{});
}

template <int W>
inline Wide<W> load_wide(const double* from) {
    Wide<W> v;
    for (int p = 0; p < Wide<W>::parts; ++p) v.part[p] = load(from + p * lanes_of<double>);
    return v;
}

template <int W>
inline void store_wide(double* to, const Wide<W>& v) {
    for (int p = 0; p < Wide<W>::parts; ++p) store(to + p * lanes_of<double>, v.part[p]);
}

inline Wide<8> widen(Vec<float> v) {
    return {convert<double, float>(__builtin_shufflevector(v, v, 0, 1, 2, 3)),
            convert<double, float>(__builtin_shufflevector(v, v, 4, 5, 6, 7))};
}
inline Wide<4> widen(Vec<double> v) { return {v}; }

inline Vec<float> narrow(const Wide<8>& v) {
    const Part<float, 4> low = convert<float, double>(v.part[0]), high = convert<float, double>(v.part[1]);
    return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7);
}
inline Vec<double> narrow(const Wide<4>& v) { return v.part[0]; }

// x where gate is not 0, and 0 elsewhere, whatever x is there.
template <int W>
inline Wide<W> where_nonzero(const Wide<W>& gate, const Wide<W>& x) {
    return each([](Vec<double> g, Vec<double> v) { return g != Vec<double>{} ? v : Vec<double>{}; }, gate, x);
}

// a / b where b > 0, and 0 elsewhere.
template <int W>
inline Wide<W> ratio(const Wide<W>& a, const Wide<W>& b) {
    return each([](Vec<double> x, Vec<double> y) { return y > Vec<double>{} ? x / y : Vec<double>{}; }, a, b);
}

template <int W>
inline Wide<W> greater(const Wide<W>& a, const Wide<W>& b) {
    return each([](Vec<double> x, Vec<double> y) { return greater<double>(x, y); }, a, b);
}

// Every lane gets what the lanes have together.
template <int W>
inline Wide<W> sum_lanes(const Wide<W>& v) {
    Vec<double> sum = v.part[0];
    for (int p = 1; p < Wide<W>::parts; ++p) sum += v.part[p];
    return each([sum = sum_lanes<double>(sum)](Vec<double>) { return sum; }, v);
}
template <int W>
inline Wide<W> greatest_lane(const Wide<W>& v) {
    Vec<double> most = v.part[0];
    for (int p = 1; p < Wide<W>::parts; ++p) most = greater<double>(most, v.part[p]);
    return each([most = greatest_lane<double>(most)](Vec<double>) { return most; }, v);
}

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
